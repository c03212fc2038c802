"""Forwards a socket of this machine to the Docker engine of another one, through ssh."""

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.launch.containers.docker_errors import DockerError

OPEN_SECS = 30.0  # for ssh to reach the host
POLL_SECS = 0.05
CLOSE_SECS = 5.0
FORWARDS = ("-N", "-o", "ExitOnForwardFailure=yes", "-o", "StreamLocalBindUnlink=yes")
ERROR_LINES = 3  # of what ssh said, in a message


class Tunnel:
    """An ssh that forwards a socket of this machine to one of a host; it ends when the host cannot be reached."""

    def __init__(self, command: Sequence[str], host: str, *, here: Path, there: str) -> None:
        """Starts ssh, and returns when the socket exists.

        Args:
            command: the words of the ssh command before the host.
            here, there: paths of the two sockets.

        Raises:
            DockerError: if the host cannot be reached.
        """
        self.host, self.socket = host, here
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [*command, *FORWARDS, "-L", f"{here}:{there}", host],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
        deadline = time.monotonic() + OPEN_SECS
        while not here.exists():
            if not self.is_open or time.monotonic() > deadline:
                reason = self.last_words or f"ssh has not answered for {OPEN_SECS:g} s"
                self.close()
                raise DockerError(f"{host} cannot be reached: {reason}")
            time.sleep(POLL_SECS)

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """Returns the last line of ssh, until the tunnel is closed."""
        if self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        text = os.pread(self._stderr.fileno(), size, 0)  # ssh writes where this file's position is: leave it alone
        lines = text.decode(errors="replace").strip().splitlines()
        return "; ".join(line.strip() for line in lines[-ERROR_LINES:])

    def close(self) -> None:
        """Ends the tunnel; closing it again does nothing."""
        self._process.terminate()
        try:
            self._process.wait(CLOSE_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
        self.socket.unlink(missing_ok=True)
