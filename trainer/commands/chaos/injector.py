"""Injects faults into a run, and measures how soon the run continues and how many steps it lost."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainer.commands.chaos.proxy import GOOD, Condition, Link, Links
from trainer.commands.chaos.schedule import Fault
from trainer.launch.fault_hooks import RunView
from trainer.observe.task_page import TaskPage
from trainer.plan.plan import Plan

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}

Progress = tuple[int, int]  # generation, global step: rises also where the step goes back


@dataclass(frozen=True)
class Recovery:
    """A fault, and how the run recovered from it."""

    fault: Fault
    step: int  # global step when it acted
    recover_secs: float | None  # until the next committed step of all tasks; none: not observed
    steps_lost: int  # according to the status pages
    at: float = field(default=0.0, compare=False)  # when it acted: seconds, monotonic


class Source(Protocol):
    """Decides which faults come when."""

    def due(self, step: int, now: float, *, is_quiet: bool) -> Sequence[Fault]:
        """Returns the faults due at a monotonic time; `is_quiet`: the run has recovered from all earlier ones."""


class Scheduled:
    """Injects each fault at its step; those at failpoints happen in the tasks."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._left = sorted((fault for fault in faults if fault.place is None), key=lambda fault: fault.step)

    def due(self, step: int, now: float, *, is_quiet: bool) -> Sequence[Fault]:
        due = [fault for fault in self._left if fault.step <= step]
        del self._left[: len(due)]
        return due


@dataclass
class _Open:
    """A fault that the run has not yet recovered from."""

    fault: Fault
    at: float
    reached: Progress  # when it acted
    pids: Mapping[str, int]  # then
    ended: set[str] = field(default_factory=set)  # tasks that were alive then and are not, or in a new attempt
    back_at: Progress | None = None  # where the run was when all of them took part again
    lowest: int | None = None  # step of a later generation
    recover_secs: float | None = None

    def poll(self, seen: RunView, reached: Progress) -> None:
        self.ended |= {name for name, pid in self.pids.items() if seen.pids.get(name) != pid}
        working = _at_work(seen)
        later = [page.step for page in working.values() if page.generation > self.reached[0]]
        self.lowest = min([*later, *([] if self.lowest is None else [self.lowest])], default=None)
        if not self._has_passed(seen.now) or not self.ended <= working.keys():
            self.back_at = None
        elif self.back_at is None:
            self.back_at = reached
        elif reached > self.back_at:
            self.recover_secs = seen.now - self.at

    def _has_passed(self, now: float) -> bool:
        """Whether the fault itself is over, so that the run can recover."""
        has_ended = self.ended.issuperset(self.fault.tasks)
        if self.fault.link is None and (self.fault.secs is None or has_ended):
            return has_ended
        return now >= self.at + (self.fault.secs or 0.0)

    def recovery(self) -> Recovery:
        lost = 0 if self.lowest is None else max(0, self.reached[1] - self.lowest)
        return Recovery(self.fault, self.reached[1], self.recover_secs, lost, self.at)


def _at_work(seen: RunView) -> dict[str, TaskPage]:
    """Returns the pages of the tasks that take part in training."""
    return {name: page for name, page in seen.pages.items() if page.state.is_at_work}


class FaultInjector:
    """`FaultHooks` for one run, or for one that is stopped and continued."""

    def __init__(
        self,
        source: Source,
        *,
        failpoints: Sequence[Fault] = (),
        links: Sequence[Link] = (),
        network_of: Callable[[], int] = lambda: 0,
        watch: Callable[[RunView], None] = lambda seen: None,
        report: Callable[[Recovery], None] = lambda recovery: None,
    ) -> None:
        """Takes the faults to inject, those that tasks inject themselves, and the links that a fault may hit.

        `network_of` returns a process in the network of isolated tasks, for the proxies of those links.

        `watch` is called with each view of the run, `report` for each fault that the run has recovered from.
        """
        self._source, self._armed, self._wanted_links = source, list(failpoints), links
        self._network_of = network_of
        self._watch, self._report = watch, report
        self._waiting: list[Fault] = []  # due, but not all of their tasks are alive
        self._faults: list[_Open] = []  # all that acted
        self._healing: list[_Open] = []  # stopped tasks and bad links
        self._reached: Progress = (0, 0)
        self._seen: RunView | None = None

    def begin(self, plan: Plan) -> None:
        self._links = Links(plan, self._wanted_links, network_of=self._network_of)

    def environment(self, task: str) -> Mapping[str, str]:
        points = ";".join(f"{fault.place}:kill@{fault.step}" for fault in self._armed if task in fault.tasks)
        return self._links.environment(task) | ({"TRAINER_FAILPOINT": points} if points else {})

    def act(self, seen: RunView) -> None:
        self._notice_failpoints(seen)
        self._reached = max(self._reached, _reached(seen))
        self._seen = seen
        self._heal(seen)
        step = self._reached[1]
        self._waiting += self._source.due(step, seen.now, is_quiet=not self._open and not self._waiting)
        for fault in [fault for fault in self._waiting if seen.pids.keys() >= set(fault.tasks)]:
            self._waiting.remove(fault)
            self._break(fault, seen)
        for one in self._open:
            one.poll(seen, self._reached)
            if one.recover_secs is not None:
                self._report(one.recovery())
        self._watch(seen)

    def end(self) -> None:
        self._links.close()
        for one in self._open:
            if self._seen is not None and one.back_at is not None:  # the last steps came between two polls
                one.recover_secs = self._seen.now - one.at

    def recoveries(self) -> list[Recovery]:
        """Returns the faults that took effect, in that order."""
        return [fault.recovery() for fault in self._faults]

    @property
    def _open(self) -> list[_Open]:
        return [fault for fault in self._faults if fault.recover_secs is None]

    def _break(self, fault: Fault, seen: RunView) -> None:
        self._faults.append(_Open(fault, seen.now, self._reached, dict(seen.pids)))
        if fault.link is not None:
            self._links.set(fault.link, _condition(fault))
            self._healing.append(self._faults[-1])
            return
        for task in fault.tasks:
            seen.signal(task, SIGNALS[fault.action])
        if fault.action == "stop" and fault.secs is not None:
            self._healing.append(self._faults[-1])

    def _heal(self, seen: RunView) -> None:
        """Ends faults whose time is over, unless a later fault has the same link or task."""
        over = [fault for fault in self._healing if seen.now >= fault.at + (fault.fault.secs or 0.0)]
        self._healing = [fault for fault in self._healing if fault not in over]
        for ended in over:
            if (link := ended.fault.link) is not None:
                still = [fault.fault for fault in self._healing if fault.fault.link == link]
                self._links.set(link, _condition(still[-1]) if still else GOOD)
                continue
            frozen = {task for fault in self._healing if fault.fault.link is None for task in fault.fault.tasks}
            for task in ended.fault.tasks:
                is_same = seen.pids.get(task) == ended.pids[task]  # else another attempt of it, which was never stopped
                if is_same and task not in frozen:
                    seen.signal(task, signal.SIGCONT)

    def _notice_failpoints(self, seen: RunView) -> None:
        """Attributes the end of a task to its failpoint, unless another fault explains it."""
        before = self._seen
        if before is None or not self._armed:
            return
        ended = {name for name, pid in before.pids.items() if seen.pids.get(name) != pid}
        explained = any(fault.fault.action in SIGNALS for fault in self._open)
        for task in ended:
            due = [fault for fault in self._armed if task in fault.tasks]
            if due and (not explained or self._reached[1] >= due[0].step):
                first = min(due, key=lambda fault: fault.step)
                self._armed.remove(first)
                self._faults.append(_Open(first, seen.now, self._reached, before.pids))


def _reached(seen: RunView) -> Progress:
    """Returns the step that the workers have reached; a ps can be one step ahead of the other shards."""
    pages = [page for name, page in _at_work(seen).items() if name.startswith("worker:")]
    return max(((page.generation, page.step) for page in pages), default=(0, 0))


def _condition(fault: Fault) -> Condition:
    return {
        "cut": Condition(is_cut=True),
        "reset": Condition(is_reset=True),
        "delay": Condition(delay_ms=fault.amount, jitter_ms=fault.jitter),
        "throttle": Condition(bytes_per_sec=fault.amount * 1024),
    }[fault.action]
