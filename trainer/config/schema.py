"""The shape of a run: every key that `conf/` and the command line may set, with units and limits.

YAML files in `conf/` choose values; this file says which keys exist. Limits of one key stand beside it (`limits(...)`);
what several keys must agree on is checked in `plan.py`, where the tasks are known. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from trainer.config.limits import limits, read_by

NAME = re.compile(r"[a-z0-9-]{1,63}")


class Mode(Enum):
    """What `python -m trainer` does with the config."""

    train = "train"  # plan, start the tasks, train, evaluate, export
    plan = "plan"  # print what would run where; start nothing
    doctor = "doctor"  # look at this machine and say what is missing
    check = "check"  # read what a finished run left, and say whether each step counted every replica once
    chaos = "chaos"  # train while tasks are killed, frozen and cut off, and compare with an unbroken run
    render = "render"  # write down the run for somebody else to start: see Target
    clean = "clean"  # remove the containers of runs whose launcher is gone
    selftest = "selftest"  # train 1ps1w for 20 steps, here and now, and leave nothing


class Launch(Enum):
    """What the tasks of a run are."""

    local = "local"  # processes of this machine
    docker = "docker"  # containers of this machine's engine


class Target(Enum):
    """What mode=render writes."""

    compose = "compose"  # a file for Docker Compose; one for each of cluster.hosts


# How replicas meet. By call, because `async` cannot be written as a name in a class.
StrategyName = Enum(
    "StrategyName",
    {
        "auto": "auto",  # local for one process, sync otherwise
        "local": "local",  # one process
        "sync": "sync",  # every update waits for all replicas
        "async": "async",  # every gradient is an update
        "backup": "backup",  # an update waits for a quorum of the replicas; what comes later is dropped and counted
        "all_reduce": "all_reduce",  # no shards: every worker holds all parameters, gradients are summed between them
    },
)


class Precision(Enum):
    """What the replica step computes in, by Keras's names; parameters and their gradients stay float32."""

    float32 = "float32"
    mixed_bfloat16 = "mixed_bfloat16"
    mixed_float16 = "mixed_float16"  # with a loss scale that is halved where gradients overflow


class MetricName(Enum):
    """What says which checkpoint is the best."""

    accuracy = "accuracy"  # the highest
    loss = "loss"  # the lowest


class NotFinitePolicy(Enum):
    """What follows when a gradient or a loss is NaN or infinite; its update is never applied."""

    stop = "stop"  # the run ends with 65; checkpoints stay as they are
    skip = "skip"  # the step counts, its update does not; said once for each
    rollback = "rollback"  # back to the newest checkpoint, and on with other batches


# What follows when a checkpoint cannot be written. By call, because `continue` cannot be written as a name in a class.
SaveErrorPolicy = Enum(
    "SaveErrorPolicy",
    {
        "stop": "stop",  # the run ends with 74; earlier checkpoints stay as they are
        "continue": "continue",  # training goes on, and says so at every save that fails
    },
)


class OptimizerName(Enum):
    """The update rule; each equals the `keras.optimizers` class of that name."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    rmsprop = "rmsprop"
    adagrad = "adagrad"


class ScheduleName(Enum):
    """How the learning rate moves with the global step."""

    constant = "constant"
    exponential = "exponential"
    cosine = "cosine"


class LossName(Enum):
    """The loss of one batch; each is the mean over its examples."""

    sparse_categorical_crossentropy = "sparse_categorical_crossentropy"  # integer labels, logits [N, classes]
    binary_crossentropy = "binary_crossentropy"  # labels 0 or 1, logits [N, 1]
    mean_squared_error = "mean_squared_error"  # targets of the output's shape


class Wire(Enum):
    """How parameters and gradients travel between shard hosts and workers; kept and summed they are float32."""

    auto = "auto"  # memory where it can be, otherwise float32
    float32 = "float32"
    bfloat16 = "bfloat16"  # rounded to nearest: half the bytes
    memory = "memory"  # do not travel: they lie in memory that all tasks of this machine share


class PlacementName(Enum):
    """Which shard the next parameter goes to."""

    greedy = "greedy"  # largest first, to the lightest shard
    round_robin = "round_robin"  # creation order, as TensorFlow's replica_device_setter


@dataclass
class ClusterConfig:
    """How many tasks each job has, and where they listen."""

    name: str = "local"  # as typed: 2ps4w, 4w, local, ...
    ps: int = field(default=0, metadata=limits(at_least=0))
    worker: int = field(default=1, metadata=limits(at_least=1))
    evaluator: int = field(default=0, metadata=limits(at_least=0))
    addresses: dict[str, list[str]] = field(default_factory=dict)  # job -> "host:port"; empty: free ports, this machine
    # machines that share the tasks out, for mode=render: gpu-a, or {address: gpu-a, gpus: 4, ps: 1, worker: 4}
    hosts: list[Any] = field(default_factory=list)


@dataclass
class ModelConfig:
    """A function of trainer/workload/models or of the file named by `user`, and its keyword arguments."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    loss: LossName = LossName.sparse_categorical_crossentropy


@dataclass
class DataConfig:
    """A function of trainer/workload/data or of the file named by `user`, and its keyword arguments."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class StrategyConfig:
    """How gradients of the replicas become one update."""

    name: StrategyName = StrategyName.auto
    quorum: int | None = None  # backup: fresh gradients an update waits for, 1..replicas
    # async: steps; older gradients are dropped and counted, by each shard for itself; none: all are applied
    max_staleness: int | None = field(default=None, metadata=limits(at_least=0) | read_by("async"))
    # of parameters to workers and of gradients back; metrics and BatchNorm's statistics stay float32
    wire: Wire = field(default=Wire.auto, metadata=read_by("sync", "async", "backup"))
    # all_reduce: gradients that travel as one message; smaller ones leave while the backward pass goes on
    pack_mib: float = field(default=4.0, metadata=limits(above=0) | read_by("all_reduce"))


@dataclass
class ScheduleConfig:
    """Learning rate by global step."""

    name: ScheduleName = ScheduleName.constant
    decay_steps: int = field(default=1000, metadata=limits(at_least=1))  # steps
    # factor each decay_steps
    decay_rate: float = field(default=0.96, metadata=limits(above=0, at_most=1) | read_by("exponential"))
    staircase: bool = field(default=False, metadata=read_by("exponential"))  # decay at whole intervals only
    # steps from 0 to the full rate
    warmup_steps: int = field(default=0, metadata=limits(at_least=0) | read_by("cosine"))
    # share of the rate left at the end
    final_fraction: float = field(default=0.0, metadata=limits(at_least=0, at_most=1) | read_by("cosine"))


@dataclass
class OptimizerConfig:
    """The update of the parameters from the mean gradient."""

    name: OptimizerName = MISSING
    learning_rate: float = field(default=0.001, metadata=limits(above=0))
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    momentum: float = field(default=0.0, metadata=limits(at_least=0, below=1) | read_by("sgd", "rmsprop"))
    nesterov: bool = field(default=False, metadata=read_by("sgd"))
    beta_1: float = field(default=0.9, metadata=limits(at_least=0, below=1) | read_by("adam", "adamw"))
    beta_2: float = field(default=0.999, metadata=limits(at_least=0, below=1) | read_by("adam", "adamw"))
    rho: float = field(default=0.9, metadata=limits(at_least=0, below=1) | read_by("rmsprop"))
    centered: bool = field(default=False, metadata=read_by("rmsprop"))
    initial_accumulator: float = field(default=0.1, metadata=limits(at_least=0) | read_by("adagrad"))
    epsilon: float = field(default=1e-7, metadata=limits(above=0))
    weight_decay: float = field(default=0.0, metadata=limits(at_least=0))  # decoupled; share of the parameter x rate
    clip_norm: float | None = field(default=None, metadata=limits(above=0))  # global norm over all shards
    ema: float | None = field(default=None, metadata=limits(above=0, below=1))  # momentum of the averaged weights

    def slots(self) -> dict[str, float]:
        """The vectors kept beside the parameters, in a fixed order, with the value that each starts from."""
        kept = {
            OptimizerName.sgd: {"momentum": self.momentum > 0},
            OptimizerName.adam: {"momentum": True, "velocity": True},
            OptimizerName.adamw: {"momentum": True, "velocity": True},
            OptimizerName.rmsprop: {
                "velocity": True,
                "momentum": self.momentum > 0,
                "average_gradient": self.centered,
            },
            OptimizerName.adagrad: {"accumulator": True},
        }[self.name]
        names = [name for name, is_kept in kept.items() if is_kept] + (["ema"] if self.ema is not None else [])
        return {name: self.initial_accumulator if name == "accumulator" else 0.0 for name in names}


@dataclass
class DeviceConfig:
    """What a task may use of its machine. Keys of the mappings are a job (`worker`) or a task (`worker:0`)."""

    gpus: dict[str, list[int]] = field(default_factory=dict)  # visible GPUs by their index on the host; none by default
    memory_fraction: dict[str, float] = field(default_factory=dict)  # share of each visible GPU, in (0, 1]
    memory_mib: dict[str, int] = field(default_factory=dict)  # of each visible GPU, instead of a share
    growth: dict[str, bool] = field(default_factory=dict)  # take GPU memory as it is needed, instead of either
    # inside an operation; default: the host's cores, shared out among its replicas, and once more among its ps
    intra_op_threads: dict[str, int] = field(default_factory=dict)
    # operations side by side; 1 deadlocks a server that waits in queues
    inter_op_threads: dict[str, int] = field(default_factory=dict)
    soft_placement: dict[str, bool] = field(default_factory=dict)  # where a kernel is missing use the CPU; default true
    # devices of one worker's replicas, e.g. [/gpu:0,/gpu:1]; none: one replica, on its first GPU or on the CPU
    replicas: list[str] = field(default_factory=list)
    parameters: str = "/cpu:0"  # where a task that holds parameters keeps them
    layers: dict[str, str] = field(default_factory=dict)  # pattern of layer paths (fnmatch) -> device in the replica
    log_placement: bool = False  # write down where everything ran, and fail if it is not as planned


@dataclass
class PlacementConfig:
    """Which shard holds which parameter."""

    name: PlacementName = PlacementName.greedy
    pins: dict[str, int] = field(default_factory=dict)  # pattern of parameter paths (fnmatch) -> shard
    # MiB; a larger parameter is cut into parts that may lie on several shards; none: it stays whole
    max_part_mib: float | None = field(default=None, metadata=limits(above=0))
    # shards of each host, pulled, pushed and updated side by side, and the next step's pulled ahead: for slow links
    buckets: int = field(default=1, metadata=limits(at_least=1, at_most=64))


@dataclass
class TrainConfig:
    steps: int = field(default=300, metadata=limits(at_least=1))  # global steps
    batch_size: int = field(default=256, metadata=limits(at_least=1))  # global: examples of one step of all replicas
    # parts that a replica computes its examples in, one after the other, to need less memory
    accumulate: int = field(default=1, metadata=limits(at_least=1))
    precision: Precision = Precision.float32
    jit: bool = False  # compile the replica step with XLA
    on_not_finite: NotFinitePolicy = NotFinitePolicy.stop


@dataclass
class EvaluateConfig:
    every: int = field(default=0, metadata=limits(at_least=0))  # steps; 0: once, at the end
    batch_size: int = field(default=500, metadata=limits(at_least=1))
    best_metric: MetricName = MetricName.accuracy  # what an evaluator task keeps the best checkpoint by


@dataclass
class CheckpointConfig:
    every: int = field(default=100, metadata=limits(at_least=0))  # steps; 0: only the last one
    keep: int = field(default=3, metadata=limits(at_least=1))  # newest checkpoints kept
    on_error: SaveErrorPolicy = SaveErrorPolicy.stop


@dataclass
class SummaryConfig:
    every: int = field(default=10, metadata=limits(at_least=1))  # steps between lines of history.jsonl and events
    histogram_every: int = field(default=0, metadata=limits(at_least=0))  # steps; 0: no histograms
    lines: bool = False  # print every line of the history, in place of one every few seconds
    journal: bool = False  # every task also writes down each of its steps, for mode=check


@dataclass
class TimeoutsConfig:
    roll_call_secs: float = field(default=120.0, metadata=limits(above=0))  # all tasks up
    stop_grace_secs: float = field(default=30.0, metadata=limits(above=0))  # from SIGTERM to SIGKILL
    heartbeat_secs: float = field(default=10.0, metadata=limits(above=0))  # a task that is silent for longer is gone
    # a step that takes longer, and 20 times the median, is stuck: who it waits for is started again (the first step of
    # a task compiles, and may take ten times as long)
    step_secs: float = field(default=60.0, metadata=limits(above=0))


@dataclass
class RestartConfig:
    """How often a task that failed is started again, and how soon."""

    max: int = field(default=3, metadata=limits(at_least=0))  # of each task, within the window
    max_of: dict[str, int] = field(default_factory=dict)  # job (`ps`) or task (`worker:1`) -> its own number
    window_secs: float = field(default=3600.0, metadata=limits(above=0))  # restarts longer ago do not count
    delay_secs: float = field(default=1.0, metadata=limits(at_least=0))  # before the first; each next one waits twice


@dataclass
class ChaosConfig:
    """Of mode=chaos: the faults that a run must survive."""

    schedule: str = ""  # e.g. "kill worker:2 @40; stop ps:0 @80 for 15s; kill chief @120": one run under all of these
    random: int = field(default=0, metadata=limits(at_least=0))  # runs of each kind, with one fault at a random moment
    kinds: list[str] = field(default_factory=list)  # of the random faults; empty: all that the cluster can have
    seed: int = field(default=0, metadata=limits(at_least=0))  # of the random moments
    minutes: float = field(default=0.0, metadata=limits(at_least=0))  # soak: one run of so long, under random faults
    every_secs: float = field(default=60.0, metadata=limits(above=0))  # soak: between two faults


@dataclass
class ContainerConfig:
    """What a task's container is made of, and may use. Keys of the mappings are a job or a task."""

    image: str | None = None  # none: trainer:gpu where a task sees a GPU, else trainer:cpu
    memory_mib: dict[str, int] = field(default_factory=dict)  # limit, without swap; none: the host's memory
    cpus: dict[str, float] = field(default_factory=dict)  # limit, in cores; none: all of the host's
    pids: int = field(default=4096, metadata=limits(at_least=64))  # limit of processes and threads
    tmp_mib: int = field(default=256, metadata=limits(at_least=16))  # MiB of /tmp, which is memory
    mounts: list[str] = field(default_factory=list)  # paths of the host that tasks see too, and cannot write


@dataclass
class SecurityConfig:
    allow_untrusted_network: bool = False  # accept public addresses: TensorFlow's gRPC has no authentication, no TLS


@dataclass
class PlanConfig:
    json: str | None = None  # also write the plan to this file
    # milliseconds of one example's forward and backward pass, measured on one core or on the replica's GPU; none: from
    # the model's floating-point operations
    example_ms: float | None = field(default=None, metadata=limits(above=0))
    # gigabits per second between two machines; none: 10 between those of cluster.addresses. Without addresses every
    # task is thought on a machine of its own
    link_gbps: float | None = field(default=None, metadata=limits(above=0))


@dataclass
class RunConfig:
    """Everything a run is made from."""

    mode: Mode = Mode.train
    launch: Launch = Launch.local
    target: Target = Target.compose
    name: str = "run"  # [a-z0-9-]{1,63}; starts the run directory's name
    run: str | None = None  # run directory; none: a new one under runs/
    resume: str = "auto"  # auto: from the run directory if it holds a checkpoint; never; or a checkpoint's path
    seed: int = field(default=0, metadata=limits(at_least=0, below=2**31))
    profile: bool = False  # write down where the time of the first 1000 steps goes, for a trace of all tasks
    user: str | None = None  # Python file with models and data sets of your own
    job: str | None = None  # play one task of a cluster with addresses, instead of starting them all
    task: int | None = field(default=None, metadata=limits(at_least=0))
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    summary: SummaryConfig = field(default_factory=SummaryConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
