"""Decides who computes for each worker: the worker itself, or, while it is away, another that stands in for it.

A worker's place is held by one process at a time: it takes the place's tokens. So the chief gives a place to nobody
while a page still says that its process has it, or while a process that may have it is silent. Whoever holds a place
gives it up between two steps when the chief's page no longer says that it is theirs.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from trainer.observe.peers import read_status
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.plan import Task

POLL_SECS = 0.25
STARTING_POLL_SECS = 0.05  # until every worker has its place
STOPPING_SECS = 2.0  # after a worker was asked to stop: unless the chief is asked too, the worker leaves alone
AWAY = (TaskState.starting, TaskState.building, TaskState.roll_call)  # states of a new process

_log = logging.getLogger(__name__)

Process = tuple[int, float]  # its id and start


@dataclass(frozen=True)
class Seen:
    """What a look at a worker has shown."""

    page: TaskPage | None = None
    is_gone: bool = False  # nobody listens at its address

    @property
    def is_silent(self) -> bool:
        return self.page is None and not self.is_gone

    @property
    def process(self) -> Process | None:
        return (self.page.pid, self.page.started_at) if self.page else None

    def has(self, worker: str) -> bool:
        return self.page is not None and worker in self.page.computes_for

    def wants(self, worker: str) -> bool:
        """Whether it is a process of this worker that waits for its place."""
        return self.page is not None and self.page.waits_for_place and self.page.name == worker


@dataclass
class Places:
    """Who computes for each worker."""

    holders: dict[str, str] = field(default_factory=dict)  # by worker; a worker that nobody computes for is missing
    _processes: dict[str, Process | None] = field(default_factory=dict)  # of the holders, by worker
    _has_trained: set[str] = field(default_factory=set)  # workers whose absence others would notice
    _asked_at: dict[str, float] = field(default_factory=dict)  # when a worker was first seen to stop

    def adopt(self, seen: Mapping[str, Seen]) -> bool:
        """Begins with what an earlier chief decided; returns whether all is known."""
        if any(one.is_silent for one in seen.values()):
            return False
        for name, one in seen.items():
            for worker in one.page.computes_for if one.page else ():
                if worker != next(iter(seen)):
                    self._give(worker, name, seen)
        return True

    def update(self, seen: Mapping[str, Seen], now: float) -> list[str]:
        """Gives and takes places by what the workers' pages say; returns what has changed, in words.

        Args:
            seen: by worker. The first is the chief, whose place is its own: all wait for its successor.
            now: monotonic seconds.
        """
        said = []
        for worker, one in list(seen.items())[1:]:
            if one.has(worker):
                self._has_trained.add(worker)
            if not (one.page and one.page.is_stopping):
                self._asked_at.pop(worker, None)
            elif worker not in self._asked_at:
                self._asked_at[worker] = now
            if worker not in self._processes:  # an earlier chief has given it away at the last moment
                for name in [name for name, other in seen.items() if other.has(worker)]:
                    self._give(worker, name, seen)
            holder = self.holders.get(worker)
            if holder is not None and self._must_give_up(worker, holder, seen, now):
                del self.holders[worker]
                if holder != worker:
                    said.append(f"{holder} no longer computes for {worker}")
            if worker not in self.holders and (new := self._next_holder(worker, seen, now)):
                self._give(worker, new, seen)
                if new != worker:
                    said.append(f"{new} computes for {worker} until it is back")
        return said

    def _must_give_up(self, worker: str, holder: str, seen: Mapping[str, Seen], now: float) -> bool:
        one = seen[holder]
        if one.is_silent:
            return False
        if one.is_gone or one.process != self._processes[worker]:
            return True
        if holder != worker:
            return self._leaves(holder, now) or seen[worker].wants(worker)
        return self._leaves(worker, now) and self._stand_in_for(worker, seen, now) is not None

    def _next_holder(self, worker: str, seen: Mapping[str, Seen], now: float) -> str | None:
        if any(one.has(worker) or one.is_silent for one in seen.values()):
            return None
        if seen[worker].wants(worker) and not self._leaves(worker, now):
            return worker
        is_away = seen[worker].is_gone or self._leaves(worker, now) or _is_new(seen[worker])
        return self._stand_in_for(worker, seen, now) if is_away and worker in self._has_trained else None

    def _stand_in_for(self, worker: str, seen: Mapping[str, Seen], now: float) -> str | None:
        able = [
            name
            for name, one in seen.items()
            if one.page and worker in one.page.can_stand_in_for and one.has(name) and not self._leaves(name, now)
        ]
        return min(able, key=lambda name: list(self.holders.values()).count(name), default=None)

    def _leaves(self, name: str, now: float) -> bool:
        return name in self._asked_at and now - self._asked_at[name] >= STOPPING_SECS

    def _give(self, worker: str, holder: str, seen: Mapping[str, Seen]) -> None:
        self.holders[worker], self._processes[worker] = holder, seen[holder].process


def _is_new(one: Seen) -> bool:
    return one.page is not None and one.page.state in AWAY and not one.page.waits_for_place


def decide_places(workers: Sequence[Task], status: TaskPage, is_over: Callable[[], bool]) -> None:
    """Starts the thread that decides who computes for each worker, and says so on the chief's page.

    Args:
        workers: the first is the chief.
        status: the chief's page.
        is_over: whether the run needs no worker any more.
    """

    def decide() -> None:
        chief, *others = workers
        threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="places")
        places = Places()

        def look() -> dict[str, Seen]:
            pages = [Seen(status.as_of_now()), *threads.map(_look, others)]
            return {task.name: one for task, one in zip([chief, *others], pages, strict=True)}

        while not places.adopt(look()):
            time.sleep(STARTING_POLL_SECS)
        while not is_over():
            if not status.is_stopping:  # else all stop, and nobody stands in
                for sentence in places.update(look(), time.monotonic()):
                    _log.info("%s", sentence)
                status.places = dict(places.holders)
            time.sleep(POLL_SECS if len(places.holders) == len(others) else STARTING_POLL_SECS)

    threading.Thread(target=decide, name="places", daemon=True).start()


def _look(task: Task) -> Seen:
    try:
        page = read_status(task.control, timeout_secs=1.0)
    except (ConnectionRefusedError, FileNotFoundError):
        return Seen(is_gone=True)
    except (OSError, ValueError):
        return Seen()
    return Seen(page) if page.name == task.name else Seen()
