"""The kinds of random faults, and the tasks and times that each can hit. Pure, and a function of the seed alone."""

from collections.abc import Callable, Sequence
from random import Random

from trainer.commands.chaos.schedule import Fault, FaultTargets, parse

FIRST_STEP = 5  # of a random fault
LAST_STEPS = 30  # of the run, without one: it must still be at work when a fault comes, some steps late

# By kind: the faults it may be, in the schedule's words without the step; none in a cluster that cannot have it.
KINDS: dict[str, Callable[[FaultTargets], list[str]]] = {
    "kill-worker": lambda crew: [f"kill {worker} @{{}}" for worker in crew.job("worker")[1:]],
    "kill-chief": lambda crew: ["kill chief @{}"],
    "kill-ps": lambda crew: [f"kill {ps} @{{}}" for ps in crew.job("ps")],
    "kill-all-ps": lambda crew: ["kill ps @{}"] if len(crew.job("ps")) > 1 else [],
    "kill-all": lambda crew: ["kill all @{}"],
    "stop-worker": lambda crew: [f"stop {worker} @{{}}" for worker in crew.job("worker")[1:]],
    "pause-worker": lambda crew: [f"stop {worker} @{{}} for 3s" for worker in crew.job("worker")[1:]],
    "kill-in-push": lambda crew: [f"kill {worker} in push @{{}}" for worker in _pushers(crew)],
    "kill-in-save": lambda crew: [f"kill chief in {place} @{{}}" for place in ("save-data", "save-manifest", "rename")],
    "cut-link": lambda crew: [f"cut {worker}->{ps} @{{}} for 15s" for worker, ps in links(crew)],
}
AT_A_PLACE = ("kill-in-push", "kill-in-save")  # of a task's program
NEEDS = {
    "kill-worker": "a second worker",
    "kill-ps": "a ps",
    "kill-all-ps": "two ps",
    "stop-worker": "a second worker",
    "pause-worker": "a second worker",
    "kill-in-push": "two tasks with shards",
    "cut-link": "a ps",
}


def links(crew: FaultTargets) -> list[tuple[str, str]]:
    """Returns every link that may be cut."""
    return [(worker, ps) for worker in crew.job("worker") for ps in crew.job("ps")]


def _pushers(crew: FaultTargets) -> Sequence[str]:
    """Returns the workers that can die between two pushes."""
    return crew.job("worker") if crew.is_sharded and len(crew.holders) > 1 else ()


def possible(kinds: Sequence[str], crew: FaultTargets, *, by_time: bool) -> tuple[list[str], list[str]]:
    """Returns the requested kinds (none: all) that the run can have, and why it cannot have the others."""
    wanted = list(dict.fromkeys(kinds or KINDS))
    needs = {kind: f"it needs {NEEDS[kind]}" for kind in wanted if not KINDS[kind](crew)}
    needs |= {kind: "it happens at a failpoint, not at a time" for kind in wanted if by_time and kind in AT_A_PLACE}
    return [kind for kind in wanted if kind not in needs], [f"{kind} is left out: {why}" for kind, why in needs.items()]


def draw(kind: str, random: Random, crew: FaultTargets, step: int) -> Fault:
    """Returns a random fault of a kind that the cluster can have."""
    (fault,) = parse(random.choice(KINDS[kind](crew)).format(step), crew)
    return fault


def random_faults(kind: str, count: int, seed: int, crew: FaultTargets) -> list[Fault]:
    """Returns `count` faults of a kind at random steps, which do not depend on the other kinds."""
    random = Random(f"{seed} {kind}")
    return [draw(kind, random, crew, random.randint(FIRST_STEP, crew.steps - LAST_STEPS)) for _ in range(count)]
