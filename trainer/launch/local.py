"""Runs a plan as processes on this machine, and watches them to the end."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from trainer import addresses, evaluations, exit_codes, resume
from trainer.config import ConfigError, Problem, RunConfig
from trainer.launch.ports import HeldPorts
from trainer.launch.progress import HistoryLines, Progress, make_progress
from trainer.launch.tasks import Tasks
from trainer.machine import is_local
from trainer.monitor.peers import PeerError, read_status
from trainer.plan import ANY_PORT, Plan, Task
from trainer.run_directory import Lease, RunDirectory, write_atomically

POLL_SECS = 0.25
SETTLE_SECS = 0.5  # after a failure: the cause may be heard of after its consequences
LOG_LINES = 20
SAME_SIGNAL_SECS = 1.0


@dataclass
class _Life:
    """What the launcher knows of a task."""

    task: Task
    pid: int | None = None
    code: int | None = None  # once it has ended
    page: dict[str, Any] | None = None  # as last read

    @property
    def state(self) -> str:
        if self.code is not None:
            return {0: "done", exit_codes.TERMINATED: "stopped"}.get(self.code, f"ended ({self.code})")
        return self.page["state"] if self.page else "starting"


class _Signals:
    """Ctrl-C and SIGTERM while a run is watched: the first stops it cleanly, the second at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  # as they came
        self._heard_at = -math.inf

    def __enter__(self) -> _Signals:
        self._before = {
            number: signal.signal(number, lambda received, _: self._hear(received))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def _hear(self, number: int) -> None:
        """Takes one Ctrl-C for one, also where a wrapper forwards it a second time."""
        now = time.monotonic()
        if now - self._heard_at > SAME_SIGNAL_SECS:
            self.numbers.append(number)
        self._heard_at = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run(config: RunConfig, plan: Plan, directory: RunDirectory, tasks: Tasks, *, started_at: float) -> int:
    """Starts the plan's tasks, shows their progress, and sees to it that all of them end.

    Args:
        started_at: when the command was typed (Unix time, seconds).

    Returns:
        0, or the exit code of the task that failed first, or 130/143 when the user stopped the run.

    Raises:
        ConfigError: if a task's address is of another machine.
        PeerError: if a port that the config names is taken.
    """
    with _Signals() as signals, HeldPorts(2 * len(plan.tasks)) as held:
        plan = _with_ports(plan, held)
        with Lease(directory):
            found = resume.find(config.resume, directory, steps=plan.steps)
            if found is None:
                resume.set_aside(directory)
            else:
                resume.check_model(found, config)
            print(f"{directory.path}{f', resumes at step {found.step}' if found else ''}", flush=True)
            directory.write_inputs(config, plan)
            lives = {task.name: _Life(task) for task in plan.tasks}
            history = None
            if config.summary.lines:
                start = found.step if found else 0
                history = HistoryLines(directory.history, start=start, steps=plan.steps, batch=plan.update_batch)
            for task in plan.tasks:
                log = directory.path / task.log
                tasks.start(task.name, run=str(directory.path), environment=task.environment(), log=str(log))
            with make_progress(plan.tasks, plan.steps, history) as progress:
                failed = _Watch(config, directory, tasks, lives, progress, signals).watch()
            summary = _complete_summary(directory, lives, failed, started_at)
    if failed is not None:
        return _report_failure(directory, failed)
    if signals.numbers or any(life.code for life in lives.values()):
        return _report_stop(config, directory, summary, signals.numbers)
    print(_in_words(summary))
    return exit_codes.OK


def _with_ports(plan: Plan, held: HeldPorts) -> Plan:
    """Gives every task whose port is open a free one; those that the config names must be free, and of this machine.

    Raises:
        ConfigError: if an address is of another machine.
        PeerError: if a port is taken.
    """
    free = iter(held.ports)
    elsewhere = [task for task in plan.tasks if not is_local(addresses.host_of(_listens(task)))]
    if elsewhere:
        raise ConfigError([_elsewhere(task) for task in elsewhere])

    def settle(address: str) -> str:
        host, _, port = address.rpartition(":")
        if port == str(ANY_PORT):
            return f"{host}:{next(free)}"
        try:
            held.hold(int(port))
        except OSError as error:
            raise PeerError(
                f"{address} is taken ({error.strerror}); stop what listens there, or choose another"
            ) from error
        return address

    return replace(
        plan,
        tasks=tuple(
            replace(task, address=settle(task.address) if task.address else "", control=settle(task.control))
            for task in plan.tasks
        ),
    )


def _listens(task: Task) -> str:
    """Where a task listens: an evaluator, or a task alone, has its status page only."""
    return task.address or task.control


def _elsewhere(task: Task) -> Problem:
    return Problem(
        f"cluster.addresses.{task.job}[{task.index}]",
        f"{_listens(task)} is not an address of this machine, where all tasks would start",
        f"on the machine that has it, type the same command with job={task.job} task={task.index}",
    )


class _Watch:
    """Follows the tasks until all have ended."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        tasks: Tasks,
        lives: Mapping[str, _Life],
        progress: Progress,
        signals: _Signals,
    ) -> None:
        self._config, self._directory, self._tasks, self._lives = config, directory, tasks, lives
        self._progress, self._signals = progress, signals
        self._heard = 0  # signals acted upon
        self._stop_by: float | None = None  # the tasks were asked to stop, and are killed after this
        self._is_killing = False
        self._readers = ThreadPoolExecutor(max_workers=16, thread_name_prefix="pages")

    def watch(self) -> _Life | None:
        """Returns the task that failed first, if one did."""
        failed: _Life | None = None
        while any(life.code is None for life in self._lives.values()):
            self._hear(POLL_SECS)
            self._obey_signals()
            if not self._is_killing:
                failed = self._first_failure()
                self._is_killing = failed is not None
            if self._stop_by is None and any(life.code == exit_codes.TERMINATED for life in self._lives.values()):
                self._ask_to_stop("a task was asked to stop, so all do")
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                self._is_killing = True
            if self._is_killing:
                self._signal_all(signal.SIGKILL)  # each time: a task may only now be known to have started
            self._read_pages()
        self._readers.shutdown(wait=False)
        return failed

    def _hear(self, timeout_secs: float) -> None:
        for event in self._tasks.events(timeout_secs):
            life = self._lives.get(event["name"])
            if life and event["event"] == "started":
                life.pid = event["pid"]
            elif life and event["event"] == "exited":
                life.code = event["code"]

    def _obey_signals(self) -> None:
        """The first signal asks every task to save and leave; the second ends them."""
        if len(self._signals.numbers) == self._heard:
            return
        self._heard = len(self._signals.numbers)
        self._read_pages()  # the last ones may be from before the first step
        began = any(life.page and life.page["first_step_at"] for life in self._lives.values())
        if self._heard > 1 or not began:
            self._progress.say("stops at once" if self._heard > 1 else "stops before the first step")
            self._is_killing = True
        else:
            self._ask_to_stop("stops after this step and saves (once more: stops at once)")

    def _ask_to_stop(self, why: str) -> None:
        grace = self._config.timeouts.stop_grace_secs
        self._progress.say(f"{why}, within {grace:g} s")
        self._stop_by = time.monotonic() + grace
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for life in self._lives.values():
            if life.pid and life.code is None:
                self._tasks.signal(life.pid, number)

    def _first_failure(self) -> _Life | None:
        """The task whose failure explains the others: an unavailable peer is a consequence, if anything else failed."""

        def failures() -> list[_Life]:
            return [life for life in self._lives.values() if life.code not in (None, 0, exit_codes.TERMINATED)]

        if not failures():
            return None
        settled = time.monotonic() + SETTLE_SECS
        while time.monotonic() < settled:
            self._hear(max(0.0, settled - time.monotonic()))
        return min(failures(), key=lambda life: life.code == exit_codes.UNAVAILABLE)

    def _read_pages(self) -> None:
        """Reads all status pages side by side; a task that does not answer keeps its last page."""

        def read(life: _Life) -> None:
            try:
                life.page = read_status(life.task.control, timeout_secs=1.0)
            except (OSError, ValueError):
                pass  # not up yet, or leaving

        list(self._readers.map(read, [life for life in self._lives.values() if life.code is None]))
        pages = {name: life.page for name, life in self._lives.items() if life.page}
        states = {name: life.state for name, life in self._lives.items()}
        self._progress.show(pages, states)
        write_atomically(self._directory.status, json.dumps({"tasks": pages, "states": states}, indent=1))


def _complete_summary(
    directory: RunDirectory, lives: Mapping[str, _Life], failed: _Life | None, started_at: float
) -> dict[str, Any]:
    """Adds to what the chief wrote, if it came to that, what only the launcher knows."""
    summary: dict[str, Any] = {"run_dir": str(directory.path)}
    if directory.summary.exists():
        summary = json.loads(directory.summary.read_text())
    if any(life.task.job == "evaluator" for life in lives.values()):
        summary |= evaluations.results(directory, summary.get("steps"))
    first_step_at = summary.pop("first_step_at", None)
    summary |= {
        "failed": failed.task.name if failed else None,
        "seconds": round(time.time() - started_at, 3),
        "time_to_first_step_secs": round(first_step_at - started_at, 3) if first_step_at else None,
        "restarts": 0,
        "tasks": {name: {"code": life.code, "log": life.task.log} for name, life in lives.items()},
    }
    write_atomically(directory.summary, json.dumps(summary, indent=1))
    return summary


def _in_words(summary: Mapping[str, Any]) -> str:
    first, best = summary["time_to_first_step_secs"], summary.get("best")
    kept = "best: step {step}, loss {loss:.4f}, accuracy {accuracy:.4f}, {path}\n".format(**best) if best else ""
    return (
        f"done: {summary['steps']} steps in {summary['seconds']:.1f} s"
        f"{f' (first step after {first:.1f} s)' if first else ''}, {summary['examples_per_second']:,.0f} examples/s, "
        f"eval_loss {summary['eval_loss']:.4f}, eval_accuracy {summary['eval_accuracy']:.4f}\n"
        f"{kept}"
        f"params_sha256 {summary['params_sha256']}\n{summary['run_dir']}"
    )


def _report_stop(config: RunConfig, directory: RunDirectory, summary: Mapping[str, Any], signals: Sequence[int]) -> int:
    """Says whether the state was saved, and how to go on; returns the exit code."""
    if "steps" in summary:
        kept = f"saved at step {summary['steps']}"
    else:
        older = max((int(path.name) for path in directory.checkpoints.glob("*") if path.name.isdigit()), default=None)
        kept = "nothing was saved" if older is None else f"nothing was saved since step {older}"
    without = "" if config.resume == "auto" else f", without resume={config.resume}"
    print(f"stopped, {kept}; to continue, type the same command with run={directory.path}{without}")
    return 128 + signals[0] if signals else exit_codes.TERMINATED


def _report_failure(directory: RunDirectory, failed: _Life) -> int:
    """Shows the first failure and the end of its log; returns the exit code."""
    assert failed.code is not None
    log = directory.path / failed.task.log
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    starts = [number for number, text in enumerate(said) if text.startswith(f"{failed.task.name} of ")]
    tail = said[starts[-1] if starts else 0 :][-LOG_LINES:]  # of this run, where the log holds earlier ones
    print(f"{failed.task.name} failed first, exit code {failed.code}: {exit_codes.meaning(failed.code)}")
    print(f"the end of {log}:")
    for text in tail:
        print(f"    {text}")
    return failed.code if failed.code > 0 else 128 - failed.code
