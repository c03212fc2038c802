"""The plan of a run: every task, device, shard and message, before anything starts. Pure: no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from trainer.faults.problems import Problem
from trainer.plan.environment import VISIBLE, visible_gpus
from trainer.plan.fingerprint import Fingerprint
from trainer.plan.layout import WIRES, FrozenWeights, Shard, WireFormat
from trainer.plan.serialize import from_json, to_json
from trainer.plan.spans import Span, pushes_of
from trainer.plan.strategy import STRATEGIES, Strategy
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import Table, blocks_of

# XLA's newer code for CPUs takes longer to make, and where a task has several threads an update that is shared out over
# them takes many times as long as on one.
OLDER_CODE = "--xla_cpu_use_fusion_emitters=false"


@dataclass(frozen=True)
class Task:
    """One process of the cluster and what it may use."""

    job: str
    index: int
    address: str  # "host:port" of its TensorFlow server; port 0: chosen at start
    control: str  # "host:port" of its status page, or "unix:PATH"
    gpus: tuple[int, ...]  # visible ones, by their index on the host
    memory_fraction: float | None  # of each visible GPU; with no memory_mib and no growth either: nearly all of it
    intra_op_threads: int
    inter_op_threads: int
    memory_mib: int | None = None  # MiB of each visible GPU, instead of a share
    growth: bool = False  # takes GPU memory as it is needed
    soft_placement: bool = True
    cpus: int = 1  # logical CPU devices
    replicas: tuple[str, ...] = ()  # devices of this task's replicas; ("/gpu:0", "/gpu:1"): its first two GPUs

    @property
    def name(self) -> str:
        return f"{self.job}:{self.index}"

    @property
    def is_chief(self) -> bool:
        return self.name == "worker:0"

    def environment(self, given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Returns environment variables that must be set before TensorFlow touches a device.

        Args:
            given: the environment that they are added to; its XLA flags are kept, and win, and if it allows some
                GPUs only, this task's are counted among those.
        """
        return {
            VISIBLE: visible_gpus(self.gpus, given),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi counts; CUDA on its own begins with the fastest
            "XLA_FLAGS": f"{OLDER_CODE} {given.get('XLA_FLAGS', '')}".strip(),
        }

    @property
    def log(self) -> str:
        """Returns the path of the task's log below the run directory."""
        return f"logs/{self.job}-{self.index}.log"


class Group(NamedTuple):
    """Parameters with the same settings of the optimizer."""

    settings: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The frozen plan of a run: the tasks do what `trainer plan` shows."""

    cluster: str
    strategy: str  # a StrategyName, never auto
    steps: int
    global_batch: int
    tasks: tuple[Task, ...]
    shards: tuple[Shard, ...]
    train_examples: int  # 0: unknown
    warnings: tuple[Problem, ...]
    quorum: int | None = None  # replicas an update waits for, of a backup strategy
    parameters: str = "/cpu:0"  # device of a shard on its host
    layers: Mapping[str, str] = field(default_factory=dict)  # device inside a replica by layer path
    wire: str = "float32"  # how vectors are sent between shard hosts and workers
    is_stream: bool = False  # the data has its own order
    frozen: FrozenWeights = field(default_factory=FrozenWeights)
    objective: str = ""  # loss and metrics, and where they come from
    optimizer: str = ""  # and where it comes from
    groups: tuple[Group, ...] = ()  # where optimizer.groups makes several
    initial: str = ""  # what was loaded of `model.init`, and what was not
    tables: tuple[Table, ...] = ()  # whose rows stay on the hosts
    slots: tuple[str, ...] = ()  # that the optimizer keeps of each row
    epochs: int | None = None  # from which `steps` was computed
    fingerprint: Fingerprint = field(default_factory=dict)  # of the data that each task must read
    counts: int = 0  # different counts that losses are divided by, if they may differ between parts

    @cached_property
    def workers(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.job == "worker")

    @cached_property
    def replicas(self) -> int:
        """Returns the number of copies of the model."""
        return sum(len(task.replicas) for task in self.workers)

    def replica_numbers(self, worker: Task) -> list[int]:
        """Returns the numbers of a worker's replicas, among all replicas of the run."""
        first = sum(len(other.replicas) for other in self.workers[: worker.index])
        return list(range(first, first + len(worker.replicas)))

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...] | None:
        """Returns, by worker, the spans of replicas whose sums it pushes; None: each pushes the mean of its own."""
        if not (self.has_shard_hosts and self.effective_strategy.waits_for_all):
            return None
        numbers = [self.replica_numbers(worker) for worker in self.workers]
        return tuple(tuple(Span(0, self.replicas).within(range(own[0], own[-1] + 1))) for own in numbers)

    @property
    def pushes(self) -> int:
        """Returns how many vectors an update takes of each shard, or how many might wait for one."""
        if not self.has_shard_hosts:
            return self.replicas
        return pushes_of(self.spans, len(self.workers))[-1].stop

    def vectors_of(self, worker: Task) -> int:
        """Returns how many vectors a worker sends to each shard in a step; in shared memory, how many messages."""
        return 1 if self.spans is None or self.wire_format.is_shared else len(self.spans[worker.index])

    @property
    def trainers(self) -> tuple[Task, ...]:
        """Returns the tasks that train: all but the evaluators."""
        return tuple(task for task in self.tasks if task.job != "evaluator")

    @property
    def evaluating_task(self) -> Task:
        """Returns the task that evaluates: the evaluator, or else the chief."""
        return next((task for task in self.tasks if task.job == "evaluator"), self.workers[0])

    @cached_property
    def effective_strategy(self) -> Strategy:
        """Returns how gradients become updates; with a quorum of all replicas, backup is sync."""
        return STRATEGIES["sync" if self.quorum == self.replicas else self.strategy]

    @property
    def quorum_workers(self) -> int:
        """Returns the workers that an update of backup waits for; each sends its replicas' mean. 0: not backup."""
        return (self.quorum or 0) // max(1, len(self.workers[0].replicas))

    @property
    def has_shard_hosts(self) -> bool:
        """Whether tasks hold shards for others."""
        return STRATEGIES[self.strategy].has_shard_hosts

    @cached_property
    def table_layout(self) -> TableLayout:
        """Returns the memory layout of tables, on this machine."""
        hosts = len(self.hosts) if self.has_shard_hosts else 1
        examples = self.global_batch // self.pushes
        if self.spans is not None:
            examples = self.replica_batch * max(span.size for spans in self.spans for span in spans)
        return TableLayout(blocks_of(self.tables, hosts), self.slots, self.pushes, examples)

    @property
    def sends_rows(self) -> bool:
        """Whether rows of tables are sent: hosts and workers share no memory, or do not wait for each other."""
        shares = self.wire_format.is_shared and self.effective_strategy.waits_for_all
        return bool(self.tables) and self.has_shard_hosts and not shares

    @property
    def wire_format(self) -> WireFormat:
        return WIRES[self.wire]

    @property
    def epoch_steps(self) -> float:
        """Returns the steps in one pass over the training data; 0 if unknown."""
        return self.train_examples / self.step_examples

    @property
    def step_examples(self) -> int:
        """Returns the examples that a step takes from the data, including those whose gradients are dropped."""
        return self.update_batch if self.effective_strategy.waits_for_one else self.global_batch

    @property
    def replica_batch(self) -> int:
        return self.global_batch // self.replicas

    @property
    def update_batch(self) -> int:
        """Returns the examples that one update averages."""
        if self.effective_strategy.waits_for_one:
            return self.global_batch // len(self.workers)
        return self.replica_batch * (self.quorum or self.replicas)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of parameters, without padding."""
        return sum(4 * piece.size for shard in self.shards for piece in (*shard.trainable, *shard.state))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Returns the tasks that hold shards for others."""
        return tuple(dict.fromkeys(shard.host for shard in self.shards)) if self.has_shard_hosts else ()

    def task(self, job: str, index: int) -> Task:
        return next(task for task in self.tasks if (task.job, task.index) == (job, index))

    def task_named(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    def jobs(self) -> dict[str, list[str]]:
        """Returns addresses by job, as `tf.train.ClusterSpec` takes them."""
        jobs: dict[str, list[str]] = {}
        for task in self.trainers:
            jobs.setdefault(task.job, []).append(task.address)
        return jobs

    def link_nbytes(self) -> dict[str, int]:
        """Returns the bytes that cross each link per step: `worker - host`, pulls and pushes together; or the ring."""
        if self.effective_strategy.has_ring:
            count, nbytes = len(self.workers), sum(shard.nbytes for shard in self.shards)
            share = 2 * (count - 1) * nbytes // count
            return {f"worker:{i} - worker:{(i + 1) % count}": share for i in range(count) if count > 1}
        nbytes_of = {
            host: sum(self.wire_format.nbytes(shard) for shard in self.shards if shard.host == host)
            for host in self.hosts
        }
        return {
            f"{worker.name} - {host}": (1 + self.vectors_of(worker)) * nbytes
            for worker in self.workers
            for host, nbytes in nbytes_of.items()
            if worker.name != host
        }

    def describe(self) -> str:
        """Describes the strategy and its consequences."""
        hosts = "the workers" if self.shards[0].host.startswith("worker") else f"{len(self.hosts)} ps"
        is_alone = STRATEGIES[self.strategy].waits_for_one
        batch = f"batch {self.update_batch} each" if is_alone else f"global batch {self.global_batch}"
        return STRATEGIES[self.strategy].describe(replicas=self.replicas, batch=batch, hosts=hosts, quorum=self.quorum)

    def reached_by(self, links: Mapping[str, Mapping[str, str]]) -> Plan:
        """Returns the plan with the addresses by which one task reaches some others."""

        def reached(task: Task) -> Task:
            link = links.get(task.name)
            return replace(task, address=link["address"], control=link["control"]) if link else task

        return replace(self, tasks=tuple(reached(task) for task in self.tasks))

    def to_json(self) -> dict[str, Any]:
        """Returns every field and what follows from them, for readers of plan.json."""
        links = self.link_nbytes()
        tasks = [to_json(task) | {"name": task.name, "log": task.log} for task in self.tasks]
        shards = [to_json(shard) | {"nbytes": shard.nbytes} for shard in self.shards]
        return to_json(self) | {
            "tasks": tasks,
            "shards": shards,
            "warnings": [to_json(warning) | {"code": warning.code} for warning in self.warnings],
            "replicas": self.replicas,
            "replica_batch": self.replica_batch,
            "bytes_per_step": sum(links.values()),
            "bytes_per_link": links,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        warnings = [{"kind": "doubtful", **warning} for warning in value["warnings"]]  # earlier versions wrote no kind
        return from_json(cls, {**value, "warnings": warnings})
