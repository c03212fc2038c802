"""The command that reaches a host, with the options that a program needs which cannot type a password."""

import shlex
from pathlib import Path

# A link may be cut for a moment, and a host that has lost its power closes no connection.
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=10"),
    *("-o", "ControlPath=none"),  # a shared connection would have keepalives of its own
)


def command(launch_ssh: str) -> list[str]:
    """The words before the host, from the text of `launch.ssh`; another program than ssh gets no options of ssh."""
    words = shlex.split(launch_ssh)
    return [*words, *(OPTIONS if Path(words[0]).name == "ssh" else ())]
