"""The launcher's side of the nursery: starts tasks, signals them and reports their ends."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.faults import exit_codes
from trainer.launch import messages
from trainer.launch.processes import warm
from trainer.plan.checks.installed import require_tensorflow
from trainer.plan.environment import MEMORY, for_tasks

if TYPE_CHECKING:
    from trainer.plan.description import ModelProbe, ProbeResult, Waits

REUSE_PORT = {"TF_GRPC_REUSE_PORT": "1"}  # the launcher holds the port


class ProcessTasks:
    """A nursery and the tasks that it started; leaving the block ends the remaining ones."""

    def __init__(self, *, fork: bool = sys.platform != "darwin", warm_minutes: float = 0.0) -> None:
        """Gets a nursery from a warm process, or starts one; `warm_minutes` as in `warm.connect`."""
        require_tensorflow()
        # The nursery's output: TensorFlow's greetings, and the reason if it fails.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `__exit__`)
        self._fork, self._pending, self._questions = fork, b"", 0
        self._is_isolated, self._isolated_pid = False, 0
        # Inherited by the tasks: from another user namespace they could not open it by this process's path.
        self.memory = os.memfd_create("trainer") if hasattr(os, "memfd_create") else None
        memory = {MEMORY: f"/proc/self/fd/{self.memory}"}
        environment = os.environ | for_tasks(os.environ) | REUSE_PORT | memory | {"CUDA_VISIBLE_DEVICES": "-1"}
        self._nursery: subprocess.Popen[bytes] | None = None
        warm_nursery = warm.connect(warm_minutes, environment, self._stderr, self.memory) if fork else None
        self._control = warm_nursery or self._start_nursery(environment)

    def _start_nursery(self, environment: Mapping[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        how = "fork" if self._fork else "plain"
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "trainer.launch.processes.nursery", str(theirs.fileno()), how, str(os.getpid())],
            env=environment,
            pass_fds=[theirs.fileno(), *([] if self.memory is None else [self.memory])],
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
        theirs.close()
        return ours

    @property
    def is_warm(self) -> bool:
        return self._nursery is None

    def __enter__(self) -> ProcessTasks:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the nursery kills its tasks and leaves
            self._control.shutdown(socket.SHUT_WR)
            while self._control.recv(1 << 16):
                pass
        self._close()

    def discard(self) -> None:
        """Ends a nursery that was not needed, even while it imports; does nothing if it has ended."""
        if self._control.fileno() < 0:
            return
        if self._nursery:
            self._nursery.kill()
        self._close()

    def _close(self) -> None:
        self._control.close()
        if self._nursery:
            self._nursery.wait()
        self._stderr.close()
        if self.memory is not None:
            os.close(self.memory)

    def describe(self, question: ModelProbe, waits: Waits = lambda *_: None) -> ProbeResult:
        """Describes a model, which a child of the nursery builds.

        Args:
            waits: called each second with the running line of the user's code, and the seconds that the child has run.
        """
        self._questions += 1
        name = f"describe {self._questions}"  # an earlier child or its own processes may still report
        self._request(messages.DescribeModel(name, question))
        while True:
            for event in self._receive(None):
                match event:
                    case messages.Exited(of) if of == name:
                        return self._failure(question, event.code)
                    case messages.Described(of) if of == name:
                        return event.answer
                    case messages.Describing(of) if of == name:
                        waits(event.line, event.secs)

    def _failure(self, question: ModelProbe, code: int) -> ProbeResult:
        """Returns the answer for a child that ended without giving one."""
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"returned exit code {code} (os._exit?)"
        text = f"the process that builds the model and opens the data {ended}"
        if place := self._crash(question.user):
            text = f"{place}: {text}"
        elif question.user is not None:
            text = f"{question.user}: {text}"
        is_users = question.user is not None
        return {"failure": text, "exit_code": exit_codes.BAD_DATA if is_users else exit_codes.INTERNAL}

    def _crash(self, user: str | None) -> str:
        """Returns the innermost line of the user's code in the stack printed by a crash; empty if there is none."""
        if user is None:
            return ""
        self._stderr.seek(0)
        stack = self._stderr.read().decode(errors="replace").rpartition("Fatal Python error")[2]
        place = re.search(rf'File "({re.escape(str(Path(user).resolve().parent))}/[^/"]+)", (line \d+) in (\S+)', stack)
        return f"{place[1]}, {place[2]}, in {place[3]}" if place else ""

    def isolate(self) -> None:
        """Starts later tasks in an isolated network; see `isolation`."""
        if not self._is_isolated:
            self._request(messages.IsolateTasks())
            self._is_isolated = True

    def isolated_pid(self) -> int:
        """Waits for the network of isolated tasks, and returns a process in it."""
        while not self._isolated_pid:
            self._receive(None)
        return self._isolated_pid

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None:
        """Starts a task, e.g. "worker:3"; an event has its process id."""
        self._request(messages.StartTask(name, run, log, dict(environment)))

    def signal(self, pid: int, number: int) -> None:
        """Sends a signal to a task, unless it has ended."""
        self._request(messages.SignalTask(pid, number))

    def events(self, timeout_secs: float) -> list[messages.TaskEvent]:
        """Returns the events, waiting at most this long.

        Raises:
            RuntimeError: if the nursery has ended.
        """
        return [event for event in self._receive(timeout_secs) if isinstance(event, messages.TaskEvent)]

    def _request(self, request: messages.Request) -> None:
        try:
            self._control.sendall(messages.encode(request))
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, timeout_secs: float | None) -> list[messages.Event]:
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        if not selector.select(timeout_secs):
            return []
        try:
            received = self._control.recv(1 << 20)
        except ConnectionResetError:  # it ended before it had read our last request
            received = b""
        if not received:
            raise self._ended()
        *lines, self._pending = (self._pending + received).split(b"\n")
        events: list[messages.Event] = [messages.decode(line) for line in lines]
        for event in events:
            if isinstance(event, messages.Isolated):
                self._isolated_pid = event.pid
        return events

    def _ended(self) -> RuntimeError:
        how = f"ended with code {self._nursery.wait()}" if self._nursery else "ended"
        self._stderr.seek(0)
        output = self._stderr.read().decode(errors="replace")[-2000:]
        return RuntimeError(f"the process that starts tasks {how}:\n{output}")
