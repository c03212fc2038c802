"""Parses faults as `chaos.schedule` spells them: "kill worker:2 @40; cut worker:1->ps:0 @60 for 15s". Pure.

kill TASK @STEP                    SIGKILL when the global step is STEP; TASK is worker:2, chief, ps (all), all
kill TASK in PLACE @STEP           at a failpoint of its program, the first time it reaches it from STEP on
term TASK @STEP                    SIGTERM: all tasks save and leave, and the run is continued
stop TASK @STEP [for 15s]          frozen; without a time, until its supervisor kills it
cut FROM->TO @STEP for 15s         FROM no longer reaches TO: data is held back, connections stay open
delay FROM->TO 50+-25ms @STEP for 10s
throttle FROM->TO 64KiB/s @STEP for 10s
reset FROM->TO @STEP               all connections of FROM to TO are torn down
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from trainer.config.schema import ClusterConfig, StrategyConfig
from trainer.faults.problems import ConfigError, Problem
from trainer.plan.devices import tasks_of
from trainer.plan.strategy import strategy_of

KEY = "chaos.schedule"
NUMBER = r"(\d+(?:\.\d+)?)"
TASK, LINK = r"(?P<target>[^\s>]+)", r"(?P<target>[^\s>]+->[^\s>]+)"
STEP, SECS = r"@(?P<step>\d+)", rf"for (?P<secs>{NUMBER})s"
# By action: the words after it, how to read them, and an example.
FORMS = {
    "kill": (rf"{TASK}(?: in (?P<place>\S+))? {STEP}", "kill TASK [in PLACE] @STEP", "kill worker:1 @40"),
    "term": (rf"{TASK} {STEP}", "term TASK @STEP", "term worker:1 @50"),
    "stop": (rf"{TASK} {STEP}(?: {SECS})?", "stop TASK @STEP [for SECONDSs]", "stop ps:0 @80 for 15s"),
    "cut": (rf"{LINK} {STEP} {SECS}", "cut FROM->TO @STEP for SECONDSs", "cut worker:1->ps:0 @60 for 15s"),
    "delay": (
        rf"{LINK} (?P<amount>{NUMBER})(?:\+-(?P<jitter>{NUMBER}))?ms {STEP} {SECS}",
        "delay FROM->TO MILLISECONDSms @STEP for SECONDSs",
        "delay worker:1->ps:0 50ms @20 for 10s",
    ),
    "throttle": (
        rf"{LINK} (?P<amount>{NUMBER})KiB/s {STEP} {SECS}",
        "throttle FROM->TO NUMBERKiB/s @STEP for SECONDSs",
        "throttle worker:1->ps:0 64KiB/s @20 for 10s",
    ),
    "reset": (rf"{LINK} {STEP}", "reset FROM->TO @STEP", "reset worker:1->ps:0 @60"),
}
CHIEF = "worker:0"


@dataclass(frozen=True)
class Fault:
    """One fault of a run."""

    action: str  # of FORMS
    target: str  # as typed: worker:1, chief, ps, all, worker:1->ps:0
    tasks: tuple[str, ...]  # the tasks that it hits; of a link, both ends
    step: int  # global step at which it acts
    secs: float | None = None
    amount: float = 0.0  # of a delay in ms, of a throttle in KiB/s
    jitter: float = 0.0  # ms
    place: str | None = None  # a failpoint

    @property
    def link(self) -> tuple[str, str] | None:
        return (self.tasks[0], self.tasks[1]) if "->" in self.target else None

    def __str__(self) -> str:
        """Returns the fault as it is typed."""
        jitter = f"+-{self.jitter:g}" if self.jitter else ""
        amount = {"delay": f" {self.amount:g}{jitter}ms", "throttle": f" {self.amount:g}KiB/s"}.get(self.action, "")
        place = f" in {self.place}" if self.place else ""
        secs = f" for {self.secs:g}s" if self.secs is not None else ""
        return f"{self.action} {self.target}{amount}{place} @{self.step}{secs}"


@dataclass(frozen=True)
class FaultTargets:
    """The tasks of a run that faults can hit."""

    tasks: tuple[str, ...]
    holders: tuple[str, ...]  # each holds state that is lost with it, so that all tasks restart
    is_sharded: bool
    steps: int

    @classmethod
    def of(cls, cluster: ClusterConfig, strategy: StrategyConfig, steps: int) -> FaultTargets:
        """Returns the targets of a run with this many steps."""
        tasks = tuple(f"{job}:{index}" for job, index in tasks_of(cluster))
        holding = "ps:" if cluster.ps else "worker:"
        holders = tuple(name for name in tasks if name.startswith(holding))
        return cls(tasks, holders, strategy_of(strategy, cluster).has_shard_hosts, steps)

    def job(self, name: str) -> tuple[str, ...]:
        return tuple(task for task in self.tasks if task.startswith(f"{name}:"))

    def named(self, target: str) -> tuple[str, ...]:
        """Returns the tasks that a word names; empty if it names none here."""
        known = {"chief": (CHIEF,), "all": self.tasks} | {task: (task,) for task in self.tasks}
        return known.get(target) or self.job(target)

    def places(self, task: str) -> tuple[str, ...]:
        """Returns the failpoints that a task can reach."""
        worker = ("step", "push") if self.is_sharded else ("step",)
        host = ("take", "apply", "token")
        chief = ("save-data", "save-manifest", "rename", *(("generation", "load") if self.is_sharded else ()))
        return (
            *(worker if task.startswith("worker:") else ()),
            *(host if self.is_sharded and task in self.holders else ()),
            *(chief if task == CHIEF else ()),
        )


def parse(text: str, crew: FaultTargets) -> list[Fault]:
    """Reads a schedule.

    Raises:
        ConfigError: with a problem for each fault that cannot be read, or cannot be in this run.
    """
    faults, problems = [], []
    for piece in filter(None, (" ".join(piece.split()) for piece in text.split(";"))):
        found = _read(piece.replace(" ->", "->").replace("-> ", "->"), crew)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            faults.append(found)
    if problems:
        raise ConfigError(problems)
    return faults


def typed(schedule: str) -> str:
    """Returns the schedule as an override, to paste into a shell."""
    return f"""'{KEY}="{schedule}"'"""


def _read(text: str, crew: FaultTargets) -> Fault | Problem:
    action, _, rest = text.partition(" ")
    if action not in FORMS:
        near = (*difflib.get_close_matches(action, FORMS, n=1), "kill")[0]
        message = f"{text!r} does not begin with a fault; available: {', '.join(FORMS)}"
        return Problem(KEY, "unknown-choice", message, f"e.g. {typed(FORMS[near][2])}")
    pattern, form, example = FORMS[action]
    match = re.fullmatch(pattern, rest)
    if match is None:
        return Problem(KEY, "malformed", f"{text!r} does not have the form {form}", f"e.g. {typed(example)}")
    said = match.groupdict()
    ends = said["target"].split("->")
    tasks = [crew.named(end) for end in ends]
    is_link = len(ends) == 2
    if not all(tasks) or (is_link and (any(len(named) != 1 for named in tasks) or tasks[0] == tasks[1])):
        return _no_target(text, said["target"], crew, is_link=is_link)
    fault = Fault(
        action,
        said["target"],
        tuple(task for named in tasks for task in named),
        int(said["step"]),
        secs=float(said["secs"]) if said.get("secs") else None,
        amount=float(said.get("amount") or 0),
        jitter=float(said.get("jitter") or 0),
        place=said.get("place"),
    )
    return _never(fault, crew) or fault


def _no_target(text: str, target: str, crew: FaultTargets, *, is_link: bool) -> Problem:
    if is_link:
        example = f"{crew.tasks[-1]}->{crew.tasks[0]}"
        message = f"{text!r}: {target} is not a link; a link goes from one task to another of {', '.join(crew.tasks)}"
        remedy = f"e.g. {example}" if len(crew.tasks) > 1 else "type cluster=1ps2w, which has links"
        return Problem(KEY, "unknown-choice", message, remedy)
    words = ["chief", "all", *(["ps"] if crew.job("ps") else [])]
    message = f"{text!r}: there is no {target}; available: {', '.join((*crew.tasks, *words))}"
    near = (*difflib.get_close_matches(target, crew.tasks, n=1), crew.tasks[-1])[0]
    return Problem(KEY, "unknown-choice", message, f"type {near}, or a larger cluster")


def _never(fault: Fault, crew: FaultTargets) -> Problem | None:
    """Returns why a fault can never happen, or None."""
    if not 0 <= fault.step <= crew.steps:
        message = f"'{fault}' is after the last step; the run has train.steps={crew.steps}"
        remedy = f"type a step from 0 to {crew.steps}, or train.steps={fault.step + 20}"
        return Problem(KEY, "out-of-range", message, remedy)
    if fault.place is None:
        return None
    for task in fault.tasks:
        if fault.place not in crew.places(task):
            places = ", ".join(crew.places(task)) or "none"
            message = f"'{fault}': {task} never reaches {fault.place!r}; available: {places}"
            return Problem(KEY, "no-match", message, f"e.g. {typed(f'kill chief in save-data @{fault.step}')}")
    return None
