"""The launcher's end of one host's nursery, which a command such as ssh carries."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict

from trainer.launch.messages import HostFacts, NurseryOrder, Request, TaskEvent, decode, encode
from trainer.launch.processes.tasks import REUSE_PORT
from trainer.plan.environment import for_tasks

CLOSE_SECS = 5.0  # for a nursery to end its tasks and itself
IMPORT_SECS = 30.0  # for one that imports TensorFlow, and notices then
CARRIED = re.compile("PYTHONPATH|(TF|XLA|KERAS|NCCL|TRAINER)_.*")  # variables of this process that the host's have too
ERROR_LINES = 3  # of what the command said, in a message


class Connection:
    """A command that runs a nursery on a host; `answer` is set when the host has replied."""

    def __init__(self, prefix: Sequence[str], order: NurseryOrder) -> None:
        """Starts the command without waiting for it.

        Args:
            prefix: the command that runs its last argument, a command line for `sh`, on the host.
        """
        self.host: str = order.host
        self.answer: HostFacts | None = None  # what it said of itself
        self.serves = False  # it has answered a request
        self.heard_at = time.monotonic()
        self._pending, self._stderr = b"", tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [*prefix, _command_line(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)  # a cut link must not stop the launcher
        self._unsent = b""

    def fileno(self) -> int:
        return self._output.fileno()

    def request(self, request: Request) -> None:
        """Sends a request; one to a nursery that has ended is lost, which `read` reports."""
        self._unsent += encode(request)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._input.fileno(), self._unsent) :]

    def read(self) -> list[TaskEvent] | None:
        """Returns the events that have arrived; None if the nursery or the connection has ended."""
        received = os.read(self.fileno(), 1 << 20)
        if not received:
            return None
        self.heard_at = time.monotonic()
        *lines, self._pending = (self._pending + received).split(b"\n")
        events = [decode(line) for line in lines if line.startswith(b"{")]  # a login may print a greeting
        for event in events:
            if isinstance(event, HostFacts):
                self.answer = event
            else:
                self.serves = True
        return [event for event in events if isinstance(event, TaskEvent)]

    def why_ended(self) -> str:
        """Describes how the command ended, with its last words."""
        try:
            code = self._process.wait(CLOSE_SECS)
        except subprocess.TimeoutExpired:  # its output has ended, and so has its use
            self._process.kill()
            code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = f"the command exited with code {code}" if code >= 0 else f"the command was ended by signal {-code}"
        return "; ".join(line.strip() for line in lines[-ERROR_LINES:]) or how

    def kill(self) -> None:
        """Ends the command; a nursery that hangs ends by itself, or when its host is reached again."""
        self._process.kill()

    def begin_close(self) -> None:
        """Asks the nursery to end, and its tasks with it."""
        with contextlib.suppress(OSError):
            self._input.close()

    def close(self) -> None:
        """Returns when the nursery has ended, or cannot be reached."""
        self.begin_close()
        is_importing = self.answer is not None and not self.serves
        try:
            self._process.wait(IMPORT_SECS if is_importing else CLOSE_SECS)
        except subprocess.TimeoutExpired:  # the host does not answer; its nursery ends by itself
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._stderr.close()


def _command_line(order: NurseryOrder) -> str:
    """Returns the command line for a shell on the host: the same Python in the same directory."""
    own = {name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)}
    settings = [f"{name}={shlex.quote(value)}" for name, value in (own | for_tasks(os.environ) | REUSE_PORT).items()]
    nursery = [sys.executable, "-m", "trainer.launch.hosts.host_nursery", json.dumps(asdict(order))]
    return f"cd {shlex.quote(os.getcwd())} && exec env {' '.join(settings)} {shlex.join(nursery)}"
