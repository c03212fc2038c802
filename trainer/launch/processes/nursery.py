"""The process that starts tasks: it has imported TensorFlow once and forks a task in milliseconds.

    launcher  --requests, JSON lines-->  nursery  --fork-->  task
              <--events, JSON lines---

The nursery makes no session, context, device or thread, so that its forks are clean: importing TensorFlow touches no
GPU, and CUDA_VISIBLE_DEVICES can still be set in the child. Where forking is not safe (macOS) it imports nothing and
starts plain processes. When the launcher dies, however it dies, the nursery ends its tasks and itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.workload import describe

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Nursery:
    def __init__(self, control: socket.socket, *, can_fork: bool) -> None:
        self._control, self._can_fork = control, can_fork
        self._children: dict[int, str] = {}  # name by pid
        self._read: tuple[Any, Any] = None, None  # which config was read last, and what it says
        self._plain: dict[int, subprocess.Popen[bytes]] = {}
        self._wakeup, writer = socket.socketpair()
        self._wakeup.setblocking(False)
        writer.setblocking(False)
        self._writer = writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno())

    def serve(self) -> None:
        """Answers requests and tells of exits until the launcher is gone."""
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                    continue
                received = self._control.recv(65536)
                if not received:
                    self._end_all()
                    return
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, request: dict[str, Any]) -> None:
        action = request.pop("do")
        if action == "start":
            self._start(**request)
        elif action == "describe":
            self._describe(request["question"])
        elif action == "signal" and request["pid"] in self._children:  # not reaped, so the pid is still the task's
            os.kill(request["pid"], request["number"])

    def _start(self, name: str, run: str, job: str, index: int, environment: dict[str, str], log: str) -> None:
        def play() -> int:
            from trainer.task import process as task

            os.environ.update(environment)
            _redirect(log)
            task.main(run, job, index, config)

        if self._can_fork:
            config = self._read_config(run)
            pid = self._fork(play)
        else:
            nursery = os.getpid()
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "trainer.task", run, job, str(index)],
                    env=os.environ | environment,
                    stdout=output,
                    stderr=output,
                    preexec_fn=lambda: _become_a_child_of(nursery),  # no thread here could hold a lock at the fork
                )
            pid = process.pid
            self._plain[pid] = process
        self._children[pid] = name
        self._tell({"event": "started", "name": name, "pid": pid})

    def _read_config(self, run: str) -> Any:
        """The config of a run, read once for all its tasks: to read it takes a task longer than to be forked."""
        from trainer.storage.run_directory import RunDirectory

        directory = RunDirectory(Path(run))
        try:
            written = (run, directory.config.stat().st_mtime_ns)
            if self._read[0] != written:
                self._read = written, directory.read_config()
            return self._read[1]
        except Exception:  # the task tries for itself then, and says why it cannot
            return None

    def _describe(self, question: dict[str, Any]) -> None:
        def answer() -> int:
            from trainer.plan import description

            told = describe.answer(description.Question(**question))
            self._tell({"event": "described", **told})
            return 0

        self._children[self._fork(answer)] = "describe"

    def _fork(self, work: Callable[[], int]) -> int:
        """Runs `work` in a child, which leaves with its result and never returns here."""
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become_a_child_of(nursery)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if pid in self._plain:
                    self._plain.pop(pid).returncode = code  # reaped here, not by subprocess
                self._tell({"event": "exited", "name": self._children.pop(pid), "pid": pid, "code": code})

    def _end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _tell(self, event: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(event).encode() + b"\n")


def _become_a_child_of(nursery: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(nursery)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, on Linux; elsewhere the nursery does what it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(70)


def _redirect(log: str) -> None:
    """Sends all output of this process, TensorFlow's too, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _import_everything() -> None:
    """Imports TensorFlow and everything that a task needs, without what Keras takes along for drawings and tables."""
    spared = [name for name in ("matplotlib", "pandas") if name not in sys.modules]
    for name in spared:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    import trainer.plan.description
    import trainer.task.process  # noqa: F401

    for name in spared:  # a user's file may want them
        del sys.modules[name]


def main() -> None:
    """Serves on the socket whose file descriptor is the first argument; the second says whether to fork."""
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # who signals a whole group ends the tasks, and they need it until then
    control = socket.socket(fileno=int(sys.argv[1]))
    can_fork = sys.argv[2] == "fork"
    die_with_parent(int(sys.argv[3]))
    if can_fork:
        gc.disable()  # what is imported stays; a task collects from its first step on
        _import_everything()
        gc.freeze()  # a collection in a child would touch, and so copy, every page it shares with the nursery
    try:
        _Nursery(control, can_fork=can_fork).serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher is gone; the kernel ends the tasks with this process


if __name__ == "__main__":
    main()
