"""Measures a launcher with up to 1,000 tasks, for which processes with status pages on real sockets stand in.

    python -m bench.many_tasks [--quick]

writes bench/results/many_tasks.md. The launcher's own supervisor follows the stand-ins: it reads their pages, writes
status.json, and restarts one that "dies". A second table has the roll call of one task for all the others. Nothing
here trains; the machine runs no task at all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.facts import cpu_model
from trainer.config.compose import load
from trainer.launch.attempts import PlannedRun, Starter
from trainer.launch.messages import Exited, Started, TaskEvent
from trainer.launch.planning import make
from trainer.launch.progress import make_progress
from trainer.launch.signals import Signals
from trainer.launch.supervisor import Supervisor
from trainer.launch.view import Course
from trainer.observe.peers import roll_call
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.plan import Plan
from trainer.storage.run_directory import RunDirectory

RESULTS = Path(__file__).parent / "results" / "many_tasks.md"
SIZES, QUICK_SIZES = (10, 100, 300, 1000), (10, 100)
PS_PER_WORKERS = 25  # one ps for so many workers
WATCH_SECS, QUICK_SECS = 20.0, 5.0
STEPS_PER_SECOND = 5.0


class Row(NamedTuple):
    tasks: int
    plan_secs: float  # to make the plan
    all_up_secs: float  # from the first start to a page of every task
    cpu_percent: float  # of one core, while all train
    age_secs: float  # of the oldest page that the launcher has, then
    restart_secs: float  # from the end of a worker to the start of its next attempt
    memory_mib: float  # of the launcher
    roll_call_secs: float  # of one task, for all others


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="fewer sizes and shorter times, only printed")
    quick = arguments.parse_args().quick
    sizes, secs = (QUICK_SIZES, QUICK_SECS) if quick else (SIZES, WATCH_SECS)
    _raise_limit_of_files()
    rows = []
    for tasks in sizes:
        rows.append(measure(tasks, secs))
        print(rows[-1], file=sys.stderr)
    text = page(rows)
    if not quick:
        RESULTS.write_text(text)
    print(text)
    return 0


def measure(tasks: int, secs: float) -> Row:
    """Supervises so many stand-ins for some seconds."""
    ps = max(1, tasks // (PS_PER_WORKERS + 1))
    workers = tasks - ps
    began = time.monotonic()
    given = load([f"cluster={ps}ps{workers}w", "model=mlp", f"train.batch_size={workers}", "train.steps=1000000000"])
    config, plan = make(given.config)
    plan_secs = time.monotonic() - began
    with stand_ins(plan) as addresses, tempfile.TemporaryDirectory() as folder:
        plan = replace(plan, tasks=tuple(replace(task, control=addresses[task.name]) for task in plan.tasks))
        directory = RunDirectory(Path(folder, "run"))
        directory.write_inputs(config, plan)
        starter = StandInStarter()
        with Signals() as signals, make_progress(Course(plan.steps)) as progress, contextlib.redirect_stdout(None):
            supervisor = Supervisor(PlannedRun(config, plan, directory, 0.0), starter, progress, signals)
            began = time.monotonic()
            thread = threading.Thread(target=supervisor.run, daemon=True)
            thread.start()
            _wait(lambda: all(attempt.page for attempt in supervisor.attempts))
            all_up_secs = time.monotonic() - began
            before, at = time.process_time(), time.monotonic()
            time.sleep(secs)
            cpu_percent = 100 * (time.process_time() - before) / (time.monotonic() - at)
            age_secs = time.monotonic() - min(attempt.heard_at for attempt in supervisor.attempts)
            ended_at = starter.end("worker:1")
            _wait(lambda: starter.starts["worker:1"] > 1)
            restart_secs = time.monotonic() - ended_at
            memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            roll_call_secs = _time_roll_call(plan)
            for task in plan.tasks:
                starter.end(task.name, code=0)
            thread.join(60)
    return Row(tasks, plan_secs, all_up_secs, cpu_percent, age_secs, restart_secs, memory_mib, roll_call_secs)


class StandInStarter(Starter):
    """Says of each task that it has started; nothing does."""

    def __init__(self) -> None:
        self.starts: dict[str, int] = {}  # by task
        self._events: list[TaskEvent] = []
        self._has_events = threading.Event()
        self._pids: dict[str, int] = {}

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None:
        self.starts[name] = self.starts.get(name, 0) + 1
        self._pids[name] = 10_000_000 + len(self._pids) + 1000 * self.starts[name]
        self._add(Started(name, self._pids[name]))

    def end(self, name: str, code: int = -9) -> float:
        """Reports the end of a task; returns when."""
        self._add(Exited(name, self._pids[name], code))
        return time.monotonic()

    def signal(self, pid: int, number: int) -> None:
        """Does nothing: there is no process."""

    def events(self, timeout_secs: float) -> list[TaskEvent]:
        self._has_events.wait(timeout_secs)
        self._has_events.clear()
        events, self._events = self._events, []
        return events

    def _add(self, event: TaskEvent) -> None:
        self._events.append(event)
        self._has_events.set()


@contextmanager
def stand_ins(plan: Plan) -> Iterator[dict[str, str]]:
    """Starts a process that serves the status page of every task, each at its own address."""
    ours, theirs = multiprocessing.Pipe()
    statuses = [TaskPage(task.job, task.index, "/run", "0" * 16) for task in plan.tasks]
    process = multiprocessing.Process(target=_serve, args=(theirs, statuses), daemon=True)
    process.start()
    try:
        yield {task.name: f"127.0.0.1:{port}" for task, port in zip(plan.tasks, ours.recv(), strict=True)}
    finally:
        process.kill()
        process.join()


def _serve(pipe: Any, statuses: list[TaskPage]) -> None:
    """Answers every request at a socket with the page of its task."""
    selector, began = selectors.DefaultSelector(), time.monotonic()
    ports = []
    for status in statuses:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ, status)
        ports.append(listener.getsockname()[1])
    pipe.send(ports)
    while True:
        for key, _ in selector.select():
            connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
            with connection:
                connection.recv(4096)
                step = int((time.monotonic() - began) * STEPS_PER_SECOND)
                page = replace(key.data, state=TaskState.training, step=step, is_ready=True, is_listening=True)
                page = replace(page, first_step_at=time.time(), examples_per_second=1.0, loss=1.0).as_of_now()
                body = json.dumps(page.to_json()).encode()
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


def _time_roll_call(plan: Plan) -> float:
    began = time.monotonic()
    me = TaskPage("worker", 0, "/run", "0" * 16)
    roll_call(me, plan.tasks[1:], until="is_ready", deadline_secs=60, report=lambda text: None)
    return time.monotonic() - began


def _wait(is_so: Any) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the launcher did not come so far in 120 s")
        time.sleep(0.01)


def _raise_limit_of_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def page(rows: list[Row]) -> str:
    """Returns the results, as Markdown."""
    processor = cpu_model(Path("/proc/cpuinfo").read_text())
    lines = [
        "# What a launcher costs as tasks are added",
        "",
        f"{processor}, {os.cpu_count()} cores. Stand-ins answer for the tasks over real sockets, in a process of their "
        "own on the same machine; see `bench/many_tasks.py`.",
        "",
        "| tasks | plan s | all pages read after s | CPU, % of a core | oldest page s | restart after s | memory MiB | "
        "roll call s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.tasks:,} | {row.plan_secs:.1f} | {row.all_up_secs:.2f} | {row.cpu_percent:.0f} | {row.age_secs:.1f} | "
        f"{row.restart_secs:.2f} | {row.memory_mib:.0f} | {row.roll_call_secs:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
