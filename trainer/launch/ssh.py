"""Builds the command that reaches a host, with options for a program that cannot type a password."""

import shlex
from pathlib import Path

# A link may be cut for a moment, and a host that has lost its power closes no connection.
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=10"),
    *("-o", "ControlPath=none"),  # a shared connection would have its own keepalives
)


def command(launch_ssh: str) -> list[str]:
    """Returns the words before the host, from `launch.ssh`; programs other than ssh get no options."""
    words = shlex.split(launch_ssh)
    return [*words, *(OPTIONS if Path(words[0]).name == "ssh" else ())]
