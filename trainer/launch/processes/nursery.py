"""Starts tasks in milliseconds, as forks of a process that has imported TensorFlow once.

    launcher  --requests, JSON lines-->  nursery  --fork-->  task
              <--events, JSON lines---

The nursery creates no session, context, device or thread, so that its forks are clean: importing TensorFlow touches no
GPU, and CUDA_VISIBLE_DEVICES can still be set in the child. Where forking is not safe (macOS) it imports nothing and
starts plain processes. When the launcher dies in any way, the nursery ends its tasks and itself.
"""

import gc
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainer.config.command_line import typed
from trainer.launch import messages
from trainer.launch.processes import describing, isolation
from trainer.launch.processes.children import adopt_orphans, die_with_parent, ended_children, live_children
from trainer.plan.environment import VISIBLE, allotted_gpus, visible_gpus

END_SECS = 10.0  # for killed processes to disappear
PLANNING_TIMES = 30  # as long as otherwise a launcher may be silent before its first task: it builds the model


class Control(Protocol):
    """The connection to the launcher: a socket, or pipes."""

    def fileno(self) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...


class _Nursery:
    def __init__(self, control: Control, *, can_fork: bool, silent_secs: float | None, allotted: str) -> None:
        self._control, self._can_fork, self._silent_secs = control, can_fork, silent_secs
        self._allotted = {VISIBLE: allotted}
        self._has_started = False  # a task, so that the launcher has made its plan
        self._children: dict[int, str] = {}  # name by pid
        self._config: tuple[Any, Any] = None, None  # the file that was read last, and its config
        self._plain: dict[int, subprocess.Popen[bytes]] = {}  # by pid, where tasks are not forked
        self._actions: dict[type[messages.Request], Callable[[Any], None]] = {
            messages.StartTask: self._start,
            messages.SignalTask: self._signal,
            messages.DescribeModel: self._describe,
            messages.IsolateTasks: lambda _: self._isolate(),
            messages.Stay: lambda _: self._report(messages.Here()),
        }
        self._wakeup, writer = socket.socketpair()
        self._wakeup.setblocking(False)
        writer.setblocking(False)
        self._writer = writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno())

    def serve(self) -> None:
        """Handles requests and reports exits until the launcher has ended, or is silent for too long."""
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        pending, heard_at = b"", time.monotonic()
        while True:
            ready = selector.select(self._silent_secs)
            patience = (self._silent_secs or math.inf) * (1 if self._has_started else PLANNING_TIMES)
            if time.monotonic() - heard_at > patience:
                self._end_all()
                return
            for key, _ in ready:
                if key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                    continue
                received, heard_at = self._control.recv(65536), time.monotonic()
                if not received:
                    self._end_all()
                    return
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    request = messages.decode(line)
                    self._actions[type(request)](request)

    def _signal(self, request: messages.SignalTask) -> None:
        if request.pid in self._children:  # not reaped, so the pid is still the task's
            os.kill(request.pid, request.number)

    def _start(self, request: messages.StartTask) -> None:
        self._has_started = True
        run, log, environment = request.run, request.log, request.environment
        job, _, index = request.name.partition(":")
        if allotted_gpus(self._allotted):
            numbers = [int(number) for number in environment[VISIBLE].split(",") if number != "-1"]
            environment = environment | {VISIBLE: visible_gpus(numbers, self._allotted)}

        def run_task() -> int:
            from trainer.task import process as task

            os.environ.update(environment)
            _redirect(log)
            task.main(run, job, int(index), config)

        if self._can_fork:
            config = self._read_config(run)
            pid = self._fork(run_task)
        else:
            with open(log, "ab") as output:
                pid = self._spawn(
                    "trainer.task", run, job, index, env=os.environ | environment, stdout=output, stderr=output
                )
        self._children[pid] = request.name
        self._report(messages.Started(request.name, pid))

    def _read_config(self, run: str) -> Any:
        """Returns the config of a run, read once for all its tasks: reading takes longer than forking."""
        from trainer.storage.run_directory import RunDirectory

        directory = RunDirectory(Path(run))
        try:
            version = (run, directory.config.stat().st_mtime_ns)
            if self._config[0] != version:
                self._config = version, directory.read_config()
            return self._config[1]
        except Exception:  # the task tries again itself, and reports the error
            return None

    def _describe(self, request: messages.DescribeModel) -> None:
        def work() -> int:
            describing.answer(request, self._report)
            return 0

        if self._can_fork:
            pid = self._fork(work)
        else:
            control = self._control.fileno()
            arguments = messages.encode(request).decode(), str(control)
            pid = self._spawn("trainer.launch.processes.describing", *arguments, pass_fds=[control])
        self._children[pid] = request.name

    def _spawn(self, module: str, *arguments: str, **options: Any) -> int:
        """Starts a process that is not a fork of this one."""
        nursery = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            preexec_fn=lambda: _prepare_child(nursery),  # the nursery has no thread that could hold a lock
            **options,
        )
        self._plain[process.pid] = process
        return process.pid

    def _isolate(self) -> None:
        isolation.enter()
        self._report(messages.Isolated(os.getpid()))

    def _fork(self, work: Callable[[], int]) -> int:
        """Runs `work` in a child, which exits with its result and never returns from here."""
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _prepare_child(nursery)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Reports the children that have ended, and kills processes that they left behind."""
        for pid, code in ended_children():
            if pid in self._plain:
                self._plain.pop(pid).returncode = code  # reaped here, not by subprocess
            if (name := self._children.pop(pid, None)) is not None:
                self._report(messages.Exited(name, pid, code))
        for pid in live_children() - self._children.keys():
            os.kill(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Ends the tasks and the processes that their code started, which become children of this process."""
        deadline = time.monotonic() + END_SECS  # a process may hang in a driver or file system forever
        while (alive := live_children() | self._children.keys()) and time.monotonic() < deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            for pid, _ in ended_children():
                self._children.pop(pid, None)

    def _report(self, event: messages.Event) -> None:
        self._control.sendall(messages.encode(event))


def _prepare_child(nursery: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    adopt_orphans()  # so that a daemon of its code becomes the nursery's child, and ends, with the task only
    die_with_parent(nursery)


def _redirect(log: str) -> None:
    """Redirects all output of this process, TensorFlow's too, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def import_everything() -> None:
    """Imports TensorFlow and everything that a task needs, but not what Keras imports for drawings and tables."""
    gc.disable()  # imported modules stay; tasks collect from their first step on
    skipped = [name for name in ("matplotlib", "pandas") if name not in sys.modules]
    for name in skipped:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    import numpy.random  # noqa: F401  # numpy and Keras import it at first use

    import trainer.task.process  # noqa: F401
    from trainer.config import keys
    from trainer.task.request_ids import make_unique

    make_unique()  # for all forks: it takes 10 ms
    keys.schema()  # which takes half of the time to read a config

    for name in skipped:  # a user's file may want them
        del sys.modules[name]
    gc.freeze()  # a collection in a child would touch, and so copy, every page it shares with its parent


def serve(control: Control, *, can_fork: bool, silent_secs: float | None = None, allotted: str = "") -> None:
    """Starts the tasks that a launcher asks for, until it has ended.

    Args:
        silent_secs: also ends when the launcher has sent nothing for this long.
        allotted: the GPUs of this host that the tasks may use, as CUDA_VISIBLE_DEVICES has them; empty: all.
    """
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group, it stops the tasks, which need the nursery
    try:
        _Nursery(control, can_fork=can_fork, silent_secs=silent_secs, allotted=allotted).serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher has ended; the kernel ends the tasks with this process


def main() -> None:
    """Serves the socket with the file descriptor in the first argument; the second is "fork" or "plain"."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(typed()[0]))
    can_fork = typed()[1] == "fork"
    die_with_parent(int(typed()[2]))
    if can_fork:
        import_everything()
    serve(control, can_fork=can_fork)


if __name__ == "__main__":
    main()
