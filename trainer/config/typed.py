"""Every key that can be typed: those of a run, and those that only one command uses."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from trainer.config.limits import limits
from trainer.config.schema import ExportConfig, ReportConfig, RunConfig, RunKeys, RunState

# What `python -m trainer` does with the config. By call, because `continue` cannot be a name in a class body.
Mode = Enum(
    "Mode",
    {
        "train": "train",  # start the tasks, train, evaluate and export
        "plan": "plan",  # show what would run where; start nothing
        "sweep": "sweep",  # train with several values of some keys; see sweep
        "status": "status",  # show how far the run in run=PATH is, and what each task does
        "stop": "stop",  # make the run in run=PATH save a checkpoint and end, and wait for it
        "continue": "continue",  # restart the run in run=PATH where it stopped, with its own config
        "save": "save",  # make the run in run=PATH save a checkpoint now, and wait for it
        "attach": "attach",  # read parameters of the run in run=PATH during training
        "runs": "runs",  # list the runs of a folder; see runs
        "console": "console",  # serve a web page to watch and steer the runs of a folder
        "report": "report",  # write report.html for the run in run=PATH, beside others named by report.beside
        "export": "export",  # write the model of the run in run=PATH for other programs; see export
        "evaluate": "evaluate",  # compute the loss and the metrics of a checkpoint of the run in run=PATH; see export
        "predict": "predict",  # write the outputs of a checkpoint of the run in run=PATH to a file; see export
        "log": "log",  # pass the run in run=PATH to loggers
        "doctor": "doctor",  # check this machine and say how to fix it
        "check": "check",  # verify a finished run: each step counted every replica once
        "chaos": "chaos",  # kill, freeze and cut off tasks while training; compare with an unbroken run
        "render": "render",  # write the files from which another tool starts the run; see target
        "clean": "clean",  # end warm processes; remove the containers of runs whose launcher has died
        "selftest": "selftest",  # train 1ps1w for 20 steps on this machine and leave nothing behind
        "init": "init",  # make a project to start from, in the folder named by project
        "schema": "schema",  # print the JSON schema of this config, for editors
    },
)


class Target(Enum):
    """What trainer render writes."""

    compose = "compose"  # a file for Docker Compose, or one for each of cluster.hosts
    stack = "stack"  # a stack for Docker Swarm
    kubernetes = "kubernetes"  # a JobSet, for a cluster that has its controller
    kubernetes_jobs = "kubernetes_jobs"  # a service, and one job for each task, for any Kubernetes


class RunOrder(Enum):
    """What trainer runs sorts by."""

    started = "started"  # when it was launched last
    name = "name"
    step = "step"
    loss = "loss"
    rate = "rate"  # examples per second
    disk = "disk"  # bytes of its directory


@dataclass(frozen=True)
class ChaosConfig:
    """The faults of trainer chaos, which a run must survive."""

    schedule: str = ""  # e.g. "kill worker:2 @40; stop ps:0 @80 for 15s; kill chief @120": one run under all of these
    random: int = field(default=0, metadata=limits(at_least=0))  # runs per kind, each with one fault at a random step
    kinds: list[str] = field(default_factory=list)  # kinds of random faults; default: all that the cluster can have
    seed: int = field(default=0, metadata=limits(at_least=0))  # random seed for the times of the faults
    minutes: float = field(default=0.0, metadata=limits(at_least=0))  # soak: length of one run under random faults
    every_secs: float = field(default=60.0, metadata=limits(above=0))  # soak: seconds between two faults


@dataclass(frozen=True)
class KubernetesConfig:
    """The objects that trainer render writes for Kubernetes."""

    claim: str = "runs"  # volume claim for the folder of all runs, which the chief and an evaluator write to
    queue: str | None = None  # Kueue's queue; default: none


@dataclass(frozen=True)
class PlanConfig:
    write_to: str | None = None  # also write the plan to this file, as JSON


@dataclass(frozen=True)
class RunsConfig:
    """The runs that trainer runs lists."""

    folder: str = "runs"  # folder whose runs are listed, including those one level below, as in sweeps
    state: RunState | None = None  # only runs in this state; default: all
    name: str = "*"  # only runs whose directory matches this pattern, e.g. "digits-*"
    sort: RunOrder = RunOrder.started  # ascending: the newest, largest or fastest run is last
    # list only this many rows, from the end; default: all
    last: int | None = field(default=None, metadata=limits(at_least=1))


@dataclass(frozen=True)
class AttachConfig:
    """The values that trainer attach reads."""

    # patterns of paths of parameters and state, e.g. ["dense*/kernel"], or of slots, "slots/*"; default: all but slots
    parameters: list[str] = field(default_factory=list)
    file: str | None = None  # also write the values to this .npz file


@dataclass(frozen=True)
class SweepConfig:
    """The search of trainer sweep."""

    # values by key: a list, or log(LOW, HIGH), linear(LOW, HIGH), integer(LOW, HIGH), from which values are drawn
    space: dict[str, Any] = field(default_factory=dict)
    # runs; default: every combination if all keys have lists, else 20
    trials: int | None = field(default=None, metadata=limits(at_least=1))
    metric: str = "eval_loss"  # value of summary.json that ranks trials; see evaluate.best_is
    # successive halving: each round trains the best 1/N of the trials N times as long; default: all to the end
    halving: int | None = field(default=None, metadata=limits(at_least=2))
    seed: int = field(default=0, metadata=limits(at_least=0))  # random seed for drawing values
    # trials that train at the same time; more than 1 needs cores_per_trial or gpus_per_trial
    parallel: int = field(default=1, metadata=limits(at_least=1))
    cores_per_trial: int | None = field(default=None, metadata=limits(at_least=1))  # default: an equal share
    gpus_per_trial: int | None = field(default=None, metadata=limits(at_least=1))  # default: none


@dataclass(frozen=True)
class ConsoleConfig:
    """The web page of trainer console, which shows the runs in runs.folder."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = field(default=8787, metadata=limits(at_least=0, below=65536))  # 0: a free one
    read_only: bool = False  # show runs, and change nothing
    kill: bool = False  # show a button that kills a task, to test recovery
    user_folder: str | None = None  # folder of the Python files that user= may name; default: user= is not allowed


@dataclass(frozen=True)
class ExportCommandConfig(ExportConfig):
    """The export at the end of a run, and what trainer export, evaluate and predict read and write."""

    # for trainer export, evaluate and predict: last, best or a step; after the command, checkpoint= is enough
    checkpoint: str = "last"
    # for trainer export: folder, default: export-STEP in the run directory; for trainer predict: file, .npz, .csv or
    # .jsonl. After the command, to= is enough
    to: str | None = None


@dataclass(frozen=True)
class ReportCommandConfig(ReportConfig):
    """The report of trainer report, and whether a run writes one at its end."""

    # directories of other runs, whose curves are drawn in the same charts
    beside: list[str] = field(default_factory=list)
    file: str | None = None  # default: report.html in the run directory


@dataclass(frozen=True)
class TypedConfig(RunKeys):
    """The config of a command: all keys of a run, and those of commands."""

    mode: Mode = Mode.train  # the command, which is typed as the first word: trainer plan
    target: Target = Target.compose  # what trainer render writes
    json: bool = False  # trainer status, attach, stop, save and runs: print JSON; --json is short for json=true
    project: str | None = None  # the folder that trainer init FOLDER makes
    export: ExportCommandConfig = field(default_factory=ExportCommandConfig)
    report: ReportCommandConfig = field(default_factory=ReportCommandConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    runs: RunsConfig = field(default_factory=RunsConfig)
    attach: AttachConfig = field(default_factory=AttachConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def run_config(self, given: tuple[str, ...] = ()) -> RunConfig:
        """Returns the config of the run, without the keys of commands; `given` as in `RunConfig`."""
        values = {key.name: getattr(self, key.name) for key in fields(RunKeys)}
        values |= {"export": ExportConfig(self.export.formats), "report": ReportConfig(self.report.at_end)}
        return RunConfig(**values, given=given)
