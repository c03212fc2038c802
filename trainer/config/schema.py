"""Every key that says what a run is, with its default, unit and limits; keys of commands are in `typed.py`.

YAML files in `conf/` choose values; this file declares the keys, and the comment on each is its help. Limits of one key
stand beside it (`limits(...)`); rules between keys are in `trainer/plan/checks`. Nothing writes to a config: what
completes one returns another.
"""

import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from omegaconf import MISSING

from trainer.config.limits import by_job, by_task, limits, read_by

NAME = re.compile(r"[a-z0-9-]{1,63}")
AUTO = "auto"
ROW_ACCUMULATOR = "row_accumulator"


class Launch(Enum):
    """What each task of a run is."""

    local = "local"  # a process on this machine
    docker = "docker"  # a container on this machine, or on one of cluster.hosts
    ssh = "ssh"  # a process on one of cluster.hosts, which this command reaches by ssh
    slurm = "slurm"  # a process on a node of this job of Slurm; outside of a job, one is submitted and followed


# How gradients meet. By call, because `async` cannot be a name in a class body.
StrategyName = Enum(
    "StrategyName",
    {
        "auto": "auto",  # local for one process, sync otherwise
        "local": "local",  # one process
        "sync": "sync",  # every update waits for all replicas
        "async": "async",  # every gradient is an update
        "backup": "backup",  # every update waits for a quorum of the replicas; later gradients are dropped and counted
        "all_reduce": "all_reduce",  # no shards: every worker holds all parameters, and gradients are summed
    },
)


class Precision(Enum):
    """What the replica step computes in, by Keras's names; parameters and gradients stay float32."""

    float32 = "float32"
    mixed_bfloat16 = "mixed_bfloat16"
    mixed_float16 = "mixed_float16"  # with a loss scale that is halved when gradients overflow


class NotFinitePolicy(Enum):
    """What to do when a gradient or a loss is NaN or infinite; its update is never applied."""

    stop = "stop"  # end the run with exit code 65; checkpoints stay as they are
    skip = "skip"  # count the step without its update, and log it
    rollback = "rollback"  # return to the newest checkpoint and continue with other batches


# What to do when a checkpoint cannot be written. By call, because `continue` cannot be a name in a class body.
SaveErrorPolicy = Enum(
    "SaveErrorPolicy",
    {
        "stop": "stop",  # end the run with exit code 74; earlier checkpoints stay as they are
        "continue": "continue",  # continue training, and log every save that fails
    },
)


class OptimizerName(Enum):
    """The update rule; each equals the `keras.optimizers` class of that name."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    rmsprop = "rmsprop"
    adagrad = "adagrad"
    lion = "lion"
    adafactor = "adafactor"
    lamb = "lamb"
    ftrl = "ftrl"


class RowRule(Enum):
    """How rows of sparse layers are updated: as other parameters, or by a separate rule."""

    same = "same"
    sgd = "sgd"
    adam = "adam"
    rmsprop = "rmsprop"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"  # one accumulator for a row: the mean of its squares
    ftrl = "ftrl"


class BestIs(Enum):
    """Which value of a metric is the best."""

    auto = "auto"  # by its name: the lowest of losses and errors, the highest of others
    lowest = "lowest"
    highest = "highest"


class RunState(Enum):
    """Whether a run is under way, or how it ended."""

    running = "running"  # its launcher, or the chief that a scheduler started, uses the directory
    done = "done"  # it has made its last step, or ended early
    stopped = "stopped"  # it was stopped before its last step
    failed = "failed"  # a task failed, and restarts could not help
    died = "died"  # its launcher, or the chief that a scheduler started, died before the run ended


class ScheduleName(Enum):
    """How the learning rate changes with the global step."""

    constant = "constant"
    exponential = "exponential"
    cosine = "cosine"


class Wire(Enum):
    """How parameters and gradients travel between shard hosts and workers; they are stored and summed as float32."""

    auto = "auto"  # memory if all tasks are on one machine and a vector has 256 KiB or more, else float32
    float32 = "float32"
    bfloat16 = "bfloat16"  # rounded to nearest: half the bytes
    memory = "memory"  # parameters and gradients stay in shared memory; messages only say where


class PlacementName(Enum):
    """Which shard gets the next parameter."""

    greedy = "greedy"  # largest first, to the lightest shard
    round_robin = "round_robin"  # in creation order, as TensorFlow's replica_device_setter


class Isolate(Enum):
    """Whether the tasks of a run on this machine get an isolated network, which no other program can reach."""

    auto = "auto"  # if the system allows it, unless cluster.addresses or code of user= may need another network
    always = "always"  # or the run does not start
    never = "never"  # anyone who can reach this machine can reach the tasks


@dataclass(frozen=True)
class ClusterConfig:
    """The number of tasks of each job, and their addresses."""

    name: str = "local"  # as typed: 2ps4w, 4w, local, ...
    ps: int = field(default=0, metadata=limits(at_least=0))  # parameter servers
    worker: int = field(default=1, metadata=limits(at_least=1))  # worker 0 is the chief
    evaluator: int = field(default=0, metadata=limits(at_least=0))  # evaluates checkpoints while the workers train
    addresses: dict[str, list[str]] = by_job()  # job -> "host:port"; empty: free ports here
    # machines to spread the tasks over: gpu-a, or {address: gpu-a, gpus: 4, ps: 1, worker: 4}
    hosts: list[Any] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        """Whether the cluster is one process, without other tasks or a server."""
        return self.name == "local"


@dataclass(frozen=True)
class ModelConfig:
    """A function of trainer/workload/models or of the file named by `user`, and its keyword arguments."""

    name: str = MISSING  # the function
    options: dict[str, Any] = field(default_factory=dict)  # its keyword arguments
    # source of initial values, matched by name and shape: a run directory, a checkpoint, .keras, .weights.h5 or .npz
    init: str | None = None
    # a name of keras.losses (mean_squared_error, ...) or a function of the file named by user, or a mapping of them by
    # output; default: that of the model's compile(), or sparse_categorical_crossentropy
    loss: Any = None
    loss_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of that loss
    loss_weights: Any = None  # weights of the outputs' losses: a list, or a mapping by output
    class_weight: Any = None  # weights of training examples by class, e.g. {0: 1, 1: 5}; default: 1
    # names of keras.metrics or of the file named by user, or {AUC: {num_thresholds: 50}}, in a list or by output;
    # default: those of the model's compile(), or the accuracy of a classifier
    metrics: Any = None


@dataclass(frozen=True)
class DataConfig:
    """A function of trainer/workload/data or of the file named by `user`, and its keyword arguments."""

    name: str = MISSING  # the function
    options: dict[str, Any] = field(default_factory=dict)  # its keyword arguments


@dataclass(frozen=True)
class StrategyConfig:
    """How the replicas' gradients become one update."""

    name: StrategyName = StrategyName.auto  # what an update waits for
    quorum: int | None = None  # backup: fresh gradients that an update waits for, 1..replicas
    # async: drop and count gradients that are more steps old than this, on each shard; default: apply all
    max_staleness: int | None = field(default=None, metadata=limits(at_least=0) | read_by("async"))
    # format of parameters and gradients in messages; metrics and BatchNorm statistics stay float32
    wire: Wire = field(default=Wire.auto, metadata=read_by("sync", "async", "backup"))
    # all_reduce: size of a message of gradients; smaller messages can leave during the backward pass
    pack_mib: float = field(default=4.0, metadata=limits(above=0) | read_by("all_reduce"))


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by global step."""

    name: ScheduleName = ScheduleName.constant
    decay_steps: float = field(default=1000, metadata=limits(at_least=1))  # steps
    # factor per decay_steps
    decay_rate: float = field(default=0.96, metadata=limits(above=0, at_most=1) | read_by("exponential"))
    staircase: bool = field(default=False, metadata=read_by("exponential"))  # decay only at whole intervals
    # steps from 0 to the peak rate
    warmup_steps: float = field(default=0, metadata=limits(at_least=0) | read_by("cosine"))
    # final rate, as a share of the peak rate
    final_fraction: float = field(default=0.0, metadata=limits(at_least=0, at_most=1) | read_by("cosine"))


@dataclass(frozen=True)
class PlateauConfig:
    """Reduces the learning rate when evaluate.best_metric no longer improves."""

    # evaluations in a row without a better evaluate.best_metric after which the rate is reduced; default: never
    patience: int | None = field(default=None, metadata=limits(at_least=1))
    factor: float = field(default=0.1, metadata=limits(above=0, below=1))  # multiplies the rate
    min_rate: float = field(default=0.0, metadata=limits(at_least=0))  # lower bound of the peak rate
    cooldown: int = field(default=0, metadata=limits(at_least=0))  # evaluations to ignore after a reduction
    min_delta: float = field(default=1e-4, metadata=limits(at_least=0))  # smaller changes do not count


@dataclass(frozen=True)
class SparseConfig:
    """The update of the rows of sparse layers (`placement.sparse`), with the other settings of the optimizer."""

    name: RowRule = RowRule.same  # update rule; same: that of the optimizer
    # peak rate, with the schedule and the plateau of the optimizer; default: that of the optimizer
    learning_rate: float | None = field(default=None, metadata=limits(above=0))


@dataclass(frozen=True)
class OptimizerConfig:
    """The update of the parameters from the mean gradient."""

    name: OptimizerName = MISSING
    learning_rate: float = field(default=0.001, metadata=limits(above=0))  # peak; scaled by schedule, plateau
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    # decay of the velocity; 0: no momentum
    momentum: float = field(default=0.0, metadata=limits(at_least=0, below=1) | read_by("sgd", "rmsprop"))
    nesterov: bool = field(default=False, metadata=read_by("sgd"))  # Nesterov momentum
    # decay of the average of gradients
    beta_1: float = field(default=0.9, metadata=limits(at_least=0, below=1) | read_by("adam", "adamw", "lamb", "lion"))
    # decay of the average of squares; for lion, of gradients
    beta_2: float = field(
        default=0.999, metadata=limits(at_least=0, below=1) | read_by("adam", "adamw", "lamb", "lion")
    )
    rho: float = field(default=0.9, metadata=limits(at_least=0, below=1) | read_by("rmsprop"))  # decay of squares
    centered: bool = field(default=False, metadata=read_by("rmsprop"))  # divide by the variance, not the square
    # initial value of the accumulator of squares
    initial_accumulator: float = field(default=0.1, metadata=limits(at_least=0) | read_by("adagrad", "ftrl"))
    # the rate is multiplied by the accumulator to this power
    learning_rate_power: float = field(default=-0.5, metadata=limits(at_most=0) | read_by("ftrl"))
    l1: float = field(default=0.0, metadata=limits(at_least=0) | read_by("ftrl"))  # L1 strength; zeroes weights
    l2: float = field(default=0.0, metadata=limits(at_least=0) | read_by("ftrl"))  # L2 strength
    l2_shrinkage: float = field(default=0.0, metadata=limits(at_least=0) | read_by("ftrl"))  # L2, by gradient
    # L2 strength as a share of 1 / rate
    beta: float = field(default=0.0, metadata=limits(at_least=0) | read_by("ftrl"))
    # the weight of a new square in the average is the step to this power
    beta_2_decay: float = field(default=-0.8, metadata=limits(at_most=0) | read_by("adafactor"))
    epsilon_1: float = field(default=1e-30, metadata=limits(above=0) | read_by("adafactor"))  # added to squares
    # lower bound of a parameter's root mean square
    epsilon_2: float = field(default=1e-3, metadata=limits(above=0) | read_by("adafactor"))
    # upper bound of the root mean square of an update, before the rate is applied
    clip_threshold: float = field(default=1.0, metadata=limits(above=0) | read_by("adafactor"))
    epsilon: float = field(default=1e-7, metadata=limits(above=0))  # added to the divisor of an adaptive update
    weight_decay: float = field(default=0.0, metadata=limits(at_least=0))  # decoupled; scaled by the rate
    clip_norm: float | None = field(default=None, metadata=limits(above=0))  # limit of the global gradient norm
    ema: float | None = field(default=None, metadata=limits(above=0, below=1))  # momentum of the averaged weights
    # settings for the parameters whose paths a pattern matches (fnmatch), e.g. [{match: [*/bias, *norm*], weight_decay:
    # 0}, {match: embedding/*, learning_rate: 0.0001}, {match: backbone/*, frozen: true}]; a later group overrides
    groups: list[Any] = field(default_factory=list)

    @property
    def measures_parameters(self) -> bool:
        """Whether an update depends on norms of whole parameters, which are then never split into parts."""
        return self.name in (OptimizerName.adafactor, OptimizerName.lamb)

    def describe(self) -> str:
        """Describes the optimizer: its name, its learning rate, and what differs from the defaults."""
        texts = [self.name.value, f"learning rate {self.learning_rate:g}"]
        if self.schedule.name is not ScheduleName.constant:
            texts.append(f"{self.schedule.name.value} schedule")
        for key in fields(self):
            value = getattr(self, key.name)
            is_shown = key.name not in ("name", "learning_rate", "schedule", "plateau", "sparse", "groups")
            if is_shown and value != key.default:
                texts.append(f"{key.name.replace('_', ' ')}" + (f" {value:g}" if value is not True else ""))
        return ", ".join(texts)

    def of_rows(self) -> "OptimizerConfig":
        """Returns the optimizer of sparse rows; adagrad for rowwise_adagrad, which differs in `row_slots`."""
        rule, rate = self.sparse.name, self.sparse.learning_rate or self.learning_rate
        name = {RowRule.same: self.name, RowRule.rowwise_adagrad: OptimizerName.adagrad}.get(rule)
        return replace(self, name=name or OptimizerName(rule.value), learning_rate=rate)

    def row_slots(self) -> dict[str, float]:
        """Returns the slots of each row with their initial values; ROW_ACCUMULATOR is a single number."""
        if self.sparse.name is RowRule.rowwise_adagrad:
            return {ROW_ACCUMULATOR: self.initial_accumulator}
        return self.of_rows().slots()

    @property
    def varies_rate(self) -> bool:
        """Whether the learning rate changes during training."""
        return self.schedule.name is not ScheduleName.constant or self.plateau.patience is not None

    def slots(self) -> dict[str, float]:
        """Returns the vectors kept beside the parameters, in a fixed order, with their initial values."""
        kept = {
            OptimizerName.sgd: {"momentum": self.momentum > 0},
            OptimizerName.adam: {"momentum": True, "velocity": True},
            OptimizerName.adamw: {"momentum": True, "velocity": True},
            OptimizerName.rmsprop: {"velocity": True, "momentum": self.momentum > 0, "average_gradient": self.centered},
            OptimizerName.adagrad: {"accumulator": True},
            OptimizerName.lion: {"momentum": True},
            OptimizerName.adafactor: {"row": True, "column": True, "unfactored": True},
            OptimizerName.lamb: {"momentum": True, "velocity": True},
            OptimizerName.ftrl: {"accumulator": True, "linear": True},
        }[self.name]
        names = [name for name, is_kept in kept.items() if is_kept] + (["ema"] if self.ema is not None else [])
        return {name: self.initial_accumulator if name == "accumulator" else 0.0 for name in names}


@dataclass(frozen=True)
class DeviceConfig:
    """The resources of a task on its machine. Mappings are by job (`worker`) or task (`worker:0`)."""

    gpus: dict[str, list[int]] = by_task()  # visible GPUs, by index on the host; default: none
    memory_fraction: dict[str, float] = by_task()  # share of each visible GPU, in (0, 1]
    memory_mib: dict[str, int] = by_task()  # MiB of each visible GPU, instead of a share
    growth: dict[str, bool] = by_task()  # take GPU memory as needed, instead of either
    # threads inside an operation; default: the host's cores, divided among its replicas, and again among its ps
    intra_op_threads: dict[str, int] = by_task()
    # operations in parallel; 1 deadlocks a server that waits in queues
    inter_op_threads: dict[str, int] = by_task()
    soft_placement: dict[str, bool] = by_task()  # use the CPU if a kernel is missing; default: true
    # devices of a worker's replicas, e.g. [/gpu:0,/gpu:1]; default: one replica, on its first GPU or on the CPU
    replicas: list[str] = field(default_factory=list)
    # device that holds parameters and updates them; auto: /cpu:0, but the GPU of a run of one process without tables
    parameters: str = AUTO
    layers: dict[str, str] = field(default_factory=dict)  # pattern of layer paths (fnmatch) -> device in the replica
    deterministic: bool = False  # the same bits in every run on GPUs too; steps may be slower
    log_placement: bool = False  # record where everything ran; fail if not as planned


@dataclass(frozen=True)
class PlacementConfig:
    """Which shard holds which parameter."""

    name: PlacementName = PlacementName.greedy
    pins: dict[str, int] = field(default_factory=dict)  # pattern of parameter paths (fnmatch) -> shard
    # auto: cut large parameters so that no host holds more than 1.1 times its share, unless name is round_robin,
    # optimizer.clip_norm is set or the optimizer is lamb or adafactor; a number of MiB: cut larger parameters into
    # parts, which are placed one by one; null: cut nothing
    max_part_mib: str | None = AUTO
    # shards on each host, sent and updated in parallel, with the next step's prefetched; for slow links
    buckets: int = field(default=1, metadata=limits(at_least=1, at_most=64))
    # patterns (fnmatch) of the paths of Embedding layers whose rows stay on the hosts: a step reads and updates only
    # the rows that it touches. Slots of the optimizer move with their row, so those of adam and rmsprop, and momentum,
    # decay only when it is touched; with sgd and adagrad the result is that of a dense layer
    sparse: list[str] = field(default_factory=list)
    # Embedding layers that take any int64 id: pattern -> capacity in rows (input_dim is ignored).
    # A row is created when a step first has its id
    growing: dict[str, int] = field(default_factory=dict)
    # pattern in growing -> number of updates with an id, including the current one, from which on its row is trained;
    # default: 1
    min_count: dict[str, int] = field(default_factory=dict)
    # pattern in growing -> steps without an id after which its row is evicted; default: never
    max_age: dict[str, int] = field(default_factory=dict)

    @property
    def has_sparse(self) -> bool:
        """Whether rows of some layers stay on the hosts."""
        return bool(self.sparse or self.growing)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = field(default=300, metadata=limits(at_least=1))  # global steps: updates of the parameters
    batch_size: int = field(default=256, metadata=limits(at_least=1))  # examples in one step, over all replicas
    # copies of the model, each of which computes its part of every batch; workers share them, and the result does not
    # depend on how; default: one for each worker, or for each of its device.replicas
    replicas: int | None = field(default=None, metadata=limits(at_least=1))
    # passes over the training data, instead of steps; examples of the next pass fill up the last batch
    epochs: int | None = field(default=None, metadata=limits(at_least=1))
    # microbatches of a replica, computed one after the other to save memory
    accumulate: int = field(default=1, metadata=limits(at_least=1))
    precision: Precision = Precision.float32
    jit: bool = False  # compile the replica step with XLA
    on_not_finite: NotFinitePolicy = NotFinitePolicy.stop


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = field(default=0, metadata=limits(at_least=0))  # steps between evaluations; 0: once, at the end
    batch_size: int = field(default=500, metadata=limits(at_least=1))  # examples evaluated at once
    # number of batches in an evaluation, for data without an end; default: all
    steps: int | None = field(default=None, metadata=limits(at_least=1))
    # the metric by which an evaluator task chooses the best checkpoint, and training ends early; default: accuracy, or
    # loss where there is none
    best_metric: str | None = None
    best_is: BestIs = BestIs.auto  # whether lower or higher best_metric is better
    # evaluations in a row without a better best_metric after which training ends early; default: never
    patience: int | None = field(default=None, metadata=limits(at_least=1))
    min_delta: float = field(default=0.0, metadata=limits(at_least=0))  # smaller changes do not count
    # keep the best evaluated state in best/, and export it instead of the last; default: if evaluate.every is set.
    # With an evaluator task it is always kept, and the last state is exported
    export_best: bool | None = None

    @property
    def keeps_best(self) -> bool:
        """Whether the chief keeps and exports the best state that it has evaluated."""
        return self.every > 0 if self.export_best is None else self.export_best


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = field(default=100, metadata=limits(at_least=0))  # steps between checkpoints; 0: only at the end
    keep: int = field(default=3, metadata=limits(at_least=1))  # number of newest checkpoints to keep
    on_error: SaveErrorPolicy = SaveErrorPolicy.stop  # what to do when a checkpoint cannot be written


@dataclass(frozen=True)
class ExportConfig:
    """The export at the end of a run."""

    # keras, weights, saved_model, onnx, litert; a format that the model cannot be written in is refused at the start.
    # Default: keras and saved_model, if possible
    formats: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HistoryConfig:
    every: int = field(default=10, metadata=limits(at_least=1))  # steps between lines of history.jsonl and events
    histogram_every: int = field(default=0, metadata=limits(at_least=0))  # steps between histograms; 0: none
    lines: bool = False  # print every line of the history, instead of one every few seconds
    journal: bool = False  # every task also records each of its steps, for trainer check


@dataclass(frozen=True)
class TimeoutsConfig:
    roll_call_secs: float = field(default=120.0, metadata=limits(above=0))  # deadline for all tasks to come up
    stop_grace_secs: float = field(default=30.0, metadata=limits(above=0))  # between SIGTERM and SIGKILL
    heartbeat_secs: float = field(default=10.0, metadata=limits(above=0))  # restart a task that is silent for longer
    # restart a task that blocks a step for longer than this and 20 times the median step; a task's first step compiles
    # and may take ten times as long
    step_secs: float = field(default=60.0, metadata=limits(above=0))
    # restart a task whose step has waited longer than this for its data; default: never
    data_secs: float | None = field(default=None, metadata=limits(above=0))


@dataclass(frozen=True)
class RestartConfig:
    """Limits and delays of restarts of failed tasks."""

    max: int = field(default=3, metadata=limits(at_least=0))  # restarts of each task within window_secs
    max_of: dict[str, int] = by_task()  # the same by job (`ps`) or task (`worker:1`)
    window_secs: float = field(default=3600.0, metadata=limits(above=0))  # older restarts do not count
    delay_secs: float = field(default=1.0, metadata=limits(at_least=0))  # before the first; doubles each time
    stand_in_secs: float | None = field(
        default=30.0, metadata=limits(at_least=0)
    )  # seconds of training after which workers prepare to compute for one that is away; null: never


@dataclass(frozen=True)
class ContainerConfig:
    """A task's container and its limits. Mappings are by job or task."""

    image: str | None = None  # default: trainer:gpu for tasks with GPUs, else trainer:cpu
    memory_mib: dict[str, int] = by_task()  # limit in MiB, without swap; default: the host's memory
    cpus: dict[str, float] = by_task()  # limit in cores; default: all of the host's
    pids: int = field(default=4096, metadata=limits(at_least=64))  # limit on processes and threads
    tmp_mib: int = field(default=256, metadata=limits(at_least=16))  # size of /tmp in MiB; it is memory
    mounts: list[str] = field(default_factory=list)  # paths of the host, mounted read-only


@dataclass(frozen=True)
class LaunchConfig:
    """How the tasks of a run are started."""

    name: Launch = Launch.local
    ssh: str = "ssh"  # the command that reaches one of cluster.hosts, e.g. "ssh -F config" or "ssh -l training"
    docker_socket: str = "/var/run/docker.sock"  # of Docker on each of cluster.hosts, for launch=docker
    # minutes for which a process that has imported TensorFlow waits for the next command, which then starts sooner;
    # default: $TRAINER_WARM_MINUTES, or 0
    warm_minutes: float | None = field(default=None, metadata=limits(at_least=0))


@dataclass(frozen=True)
class SlurmConfig:
    """The job that launch=slurm submits."""

    time: str | None = None  # limit: 30m, 2h, 1d, or as sbatch takes it; default: the partition's
    nodes: int | None = field(default=None, metadata=limits(at_least=1))  # default: as Slurm places the tasks
    cpus_per_task: int | None = field(default=None, metadata=limits(at_least=1))  # default: the partition's
    gpus_per_worker: int = field(default=0, metadata=limits(at_least=0))  # of its node, per worker
    # how often a job that was stopped before its last step, by its time limit for example, is queued again
    requeue: int = field(default=10, metadata=limits(at_least=0))
    args: str = ""  # more arguments of sbatch, e.g. "--partition=gpu --account=mine"


@dataclass(frozen=True)
class SecurityConfig:
    isolate: Isolate = Isolate.auto  # give the tasks of a run on this machine a network that no other program reaches
    allow_untrusted_network: bool = False  # accept public addresses: TensorFlow's gRPC has no authentication, no TLS


@dataclass(frozen=True)
class PrometheusConfig:
    """The endpoint /metrics for the whole run, which the launcher serves to Prometheus."""

    # 0: a free port; default: no endpoint
    port: int | None = field(default=None, metadata=limits(at_least=0, below=65536))
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: all
    discovery: str | None = None  # folder in which each run writes its address for Prometheus while it runs


@dataclass(frozen=True)
class ReportConfig:
    """Whether a run writes a report at its end."""

    at_end: bool = True  # write RUN/report.html when a run ends


@dataclass(frozen=True)
class RunKeys:
    """The keys that say what a run is; commands have additional keys, see `typed.py`."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    name: str = "run"  # [a-z0-9-]{1,63}; prefix of the run directory's name
    run: str | None = None  # run directory; default: a new one under runs/
    resume: str = "auto"  # auto: from the run directory if it holds a checkpoint; never; or a checkpoint's path
    # random seed for weights, data order and dropout
    seed: int = field(default=0, metadata=limits(at_least=0, below=2**31))
    # programs that get the history of the run: csv, mlflow, wandb, or names of entry points; each in its own process
    loggers: list[str] = field(default_factory=list)
    profile: bool = False  # record where the time of the first 1000 steps goes, as a trace of all tasks
    user: str | None = None  # Python file with your own models and data sets
    job: str | None = None  # with task: run this one task of a cluster with addresses, instead of all
    task: int | None = field(default=None, metadata=limits(at_least=0))  # index of that task within its job
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
    export: ExportConfig = field(default_factory=ExportConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)


@dataclass(frozen=True)
class RunConfig(RunKeys):
    """The config of a run: the value of each key, and which keys of the optimizer were set, not left at a default."""

    given: tuple[str, ...] = ()  # keys of optimizer that were set; the optimizer of compile() gives the others
