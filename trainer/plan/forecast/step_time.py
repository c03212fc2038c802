"""How long a step of a plan will take, why, and with how many ps it would be shortest. Pure: no TensorFlow.

A step is computing, moving vectors, updating, and waiting, one after the other; each part takes as long as it does on
the machine that has most of it to do:

    part on a machine = max(seconds of CPU of its tasks / its cores, seconds of its slowest task)

An update in one process is assumed to run on one thread, that of a shard host on all of its threads: both are nearest
to measured steps. Where each gradient is an update of its own, it takes as long as the slowest of machine, workers,
host and link does for it.

What a part costs in seconds of CPU is in `costs.py`. Between machines the wire takes at least as long as the fullest
link does for its bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from trainer.config.schema import OptimizerConfig, PlanConfig
from trainer.plan import addresses
from trainer.plan.description import Description
from trainer.plan.forecast import costs, traffic
from trainer.plan.forecast.costs import Work
from trainer.plan.forecast.traffic import Message
from trainer.plan.layout import FACTORED_SLOTS
from trainer.plan.plan import Plan, Task

COMPUTE, WIRE, UPDATE = "compute", "wire", "update"
USUAL_GBPS = 10.0  # of a link between two machines, without plan.link_gbps
LATENCY_SECS = 1e-4  # from one machine to another, once each way
NEARLY = 1.02  # times the shortest step: as good


@dataclass(frozen=True)
class Workload:
    """What a plan does not say of its steps."""

    flops: int  # of one example, forward and backward
    uncounted: tuple[str, ...]  # layers that `flops` lacks
    layers: int
    slots: int  # vectors of their size that the optimizer keeps beside the parameters
    is_clipped: bool
    cores: int  # of every machine
    example_ms: float | None = None  # measured: of one example on one core, or on the replica's GPU
    link_gbps: float | None = None  # between machines

    @classmethod
    def of(cls, description: Description, optimizer: OptimizerConfig, plan: PlanConfig, *, cores: int) -> Workload:
        return cls(
            flops=(1 + costs.BACKWARD) * description.flops,
            uncounted=description.uncounted,
            layers=len(description.layers),
            slots=sum(slot not in FACTORED_SLOTS for slot in optimizer.slots()),
            is_clipped=optimizer.clip_norm is not None,
            cores=cores,
            example_ms=plan.example_ms,
            link_gbps=plan.link_gbps,
        )


class Parts(NamedTuple):
    """Seconds of one update."""

    compute: float
    wire: float
    update: float
    wait: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def longest(self) -> str:
        return max(zip(self, self._fields, strict=True))[1]


@dataclass(frozen=True)
class Forecast:
    """What is expected of a plan."""

    parts: Parts
    examples: int  # of one update
    best: tuple[tuple[int, float], ...] = ()  # (ps, seconds of a step) of every number that was looked at

    def to_json(self) -> dict[str, Any]:
        return {
            "step_ms": _ms(self.parts.total),
            "parts_ms": {name: _ms(secs) for name, secs in self.parts._asdict().items()},
            "limits": self.parts.longest,
            "best_ps": self.best_ps,
            "step_ms_by_ps": {ps: _ms(secs) for ps, secs in self.best},
            "fitted_on": costs.FITTED_ON,
            "cpu_error": costs.ERROR,
            "step_error": costs.STEP_ERROR,
        }

    @property
    def best_ps(self) -> int | None:
        """The smallest number of ps with which a step takes nearly as little as with any."""
        least = min((secs for _, secs in self.best), default=0.0)
        return next((ps for ps, secs in self.best if secs <= NEARLY * least), None)


class Unknown(NamedTuple):
    """Why nothing can be expected."""

    reason: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return {"unknown": self.reason}


def _ms(secs: float) -> float:
    return round(1000 * secs, 3)


def forecast(plan: Plan, workload: Workload, others: Iterable[Plan] = ()) -> Forecast | Unknown:
    """What to expect of a plan; `others` are the same plan with other numbers of ps."""
    if (unknown := _unknown(plan, workload)) is not None:
        return unknown
    best = [(sum(task.job == "ps" for task in one.tasks), parts_of(one, workload).total) for one in others]
    return Forecast(parts_of(plan, workload), plan.update_batch, tuple(best))


def _unknown(plan: Plan, workload: Workload) -> Unknown | None:
    measure = "train a few steps, and give plan.example_ms: milliseconds of one example's forward and backward pass"
    if plan.effective_strategy.has_ring:
        return Unknown("all_reduce is not modelled: TensorFlow computes its sums", "see make bench")
    if plan.tables:
        return Unknown("rows of sparse layers are not modelled", "measure with train.steps=100")
    if workload.example_ms is not None:
        return None
    if gpus := sorted({device for task in plan.workers for device in task.replicas if device.startswith("/gpu")}):
        return Unknown(f"the speed of {gpus[0]} is unknown", measure)
    if workload.uncounted:
        return Unknown(f"the operations of {', '.join(workload.uncounted[:3])} cannot be counted", measure)
    return None


def work_of(
    plan: Plan, workload: Workload, messages: Mapping[Message, float] | None = None
) -> dict[str, dict[str, Work]]:
    """What each task does for one update, by part; of tasks that do nothing, nothing.

    Args:
        messages: as `messages_of` counts them, where that was done before.
    """
    done: dict[str, dict[str, Work]] = defaultdict(lambda: defaultdict(Work))

    def add(task: str, part: str, work: Work) -> None:
        done[task][part] = done[task][part].plus(work)

    share = _steps_of_a_worker(plan)
    for worker in plan.workers:
        counted = len(worker.replicas) if workload.example_ms is None else 0  # measured ones are added by `parts_of`
        flops, layers = plan.replica_batch * counted * workload.flops, counted * workload.layers
        add(worker.name, COMPUTE, Work(calls=1, flops=flops, layers=layers).times(share))
    counts, nbytes = defaultdict[str, float](float), defaultdict[str, float](float)
    for message, count in (messages_of(plan, workload) if messages is None else messages).items():
        for end in (message.sender, message.receiver):
            counts[end] += count
            nbytes[end] += count * message.nbytes
    for task, count in counts.items():
        add(task, WIRE, Work(messages=count, nbytes=nbytes[task]).times(0.5))
    is_shared = plan.wire_format.is_shared
    for shard in plan.shards:
        for worker in plan.workers if is_shared else ():  # gradients are read, and written where the host finds them
            add(worker.name, WIRE, Work(update_nbytes=2 * shard.nbytes, accesses=2).times(share))
        vectors = _pushes(plan) + 2 + 2 * workload.slots  # parameters and slots are read, and written
        vectors += 2 if is_shared else 0  # parameters once more, where the workers find them
        accesses = _pushes(plan) + 1 if is_shared else 0
        calls = _calls_of_a_host(plan)
        add(shard.host, UPDATE, Work(calls=calls, update_nbytes=vectors * shard.nbytes, accesses=accesses))
    return {task: dict(parts) for task, parts in done.items()}


def messages_of(plan: Plan, workload: Workload) -> dict[Message, float]:
    """Every message of one update, and how often it is sent; where each gradient is an update, one of several steps."""
    counts: dict[Message, float] = defaultdict(float)
    if not plan.has_shard_hosts:
        return counts
    share = _steps_of_a_worker(plan)
    for worker in plan.workers:
        for message in traffic.of_step(plan, worker.name):
            counts[message] += share
    for shard in plan.shards:
        for message in traffic.of_update(plan, shard, is_clipped=workload.is_clipped):
            counts[message] += 1
    for message in traffic.of_arrival(plan):
        counts[message] += len(plan.workers)
    return counts


def total(work: Mapping[str, Mapping[str, Work]]) -> Work:
    """The work of all tasks together."""
    return reduce(Work.plus, (one for parts in work.values() for one in parts.values()), Work())


def parts_of(plan: Plan, workload: Workload, *, rates: Work | None = None, turn_secs: float | None = None) -> Parts:
    """The expected seconds of one update, with the rates and turn_secs of costs.py unless others are given."""
    on = machines_of(plan.trainers, workload)
    is_spread = len(set(on.values())) == len(on)  # no two tasks share a machine
    messages = messages_of(plan, workload)
    work = work_of(plan, workload, messages)
    spent = {task: {part: costs.secs(one, rates) for part, one in parts.items()} for task, parts in work.items()}
    share = _steps_of_a_worker(plan)
    intra_op_threads = {task.name: task.intra_op_threads for task in plan.tasks}
    alone: dict[str, dict[str, float]] = {COMPUTE: {}, WIRE: {}, UPDATE: {}}  # seconds of a task that has the cores
    for worker in plan.workers:
        measured = _measured_secs(plan, worker, workload) * share
        threads = workload.cores if is_spread else min(workload.cores, worker.intra_op_threads * len(worker.replicas))
        on_gpu = any(device.startswith("/gpu") for device in worker.replicas)
        spent[worker.name][COMPUTE] += 0.0 if on_gpu else measured
        one = spent[worker.name][COMPUTE] / threads + (measured if on_gpu else 0.0)
        alone[COMPUTE][worker.name] = one / share
        on_wire = work[worker.name].get(WIRE, Work())
        sent = on_wire._replace(update_nbytes=0.0, accesses=0.0)  # both ends work on it, one after the other
        alone[WIRE][worker.name] = (costs.secs(on_wire, rates) + costs.secs(sent, rates)) / share
    for shard in plan.shards:
        threads = min(workload.cores, intra_op_threads[shard.host]) if plan.has_shard_hosts else 1
        alone[UPDATE][shard.host] = spent[shard.host].get(UPDATE, 0.0) / threads

    def busy(part: str) -> float:
        """Of the machine that has most to do, with all its cores."""
        load: dict[str, float] = defaultdict(float)
        for task, parts in spent.items():
            load[on[task]] += parts.get(part, 0.0)
        return max(load.values(), default=0.0) / workload.cores

    link = _link_secs(plan, workload, messages, on)
    latency = 2 * LATENCY_SECS if link else 0.0
    turn = (costs.TURN_SECS if turn_secs is None else turn_secs) if plan.has_shard_hosts else 0.0
    longest = {part: max(alone[part].values(), default=0.0) for part in alone}
    if not plan.effective_strategy.waits_for_one:
        compute, update = (max(busy(part), longest[part]) for part in (COMPUTE, UPDATE))
        return Parts(compute, max(busy(WIRE), longest[WIRE], link), update, turn + latency)
    return _async_parts(plan, {p: busy(p) for p in longest}, longest, link=link, idle=turn + latency)


def _async_parts(
    plan: Plan, busy: Mapping[str, float], alone: Mapping[str, float], *, link: float, idle: float
) -> Parts:
    """Of one update where no worker waits for another: as fast as the slowest of machine, workers, host and link."""
    count = len(plan.workers)
    by_cores = Parts(busy[COMPUTE], busy[WIRE], busy[UPDATE], 0.0)
    by_workers = Parts(alone[COMPUTE] / count, alone[WIRE] / count, alone[UPDATE] / count, idle / count)
    by_host = Parts(0.0, 0.0, alone[UPDATE], 0.0)
    by_link = Parts(0.0, link, 0.0, 0.0)
    return max(by_cores, by_workers, by_host, by_link, key=lambda parts: parts.total)


def machines_of(tasks: Sequence[Task], workload: Workload) -> dict[str, str]:
    """The machine of every task; one for each where a link is given and no addresses are."""
    hosts = {task.name: addresses.host_of(task.address) if task.address else "" for task in tasks}
    if len(set(hosts.values())) == 1 and workload.link_gbps is not None:
        return {name: name for name in hosts}
    return hosts


def _link_secs(plan: Plan, workload: Workload, messages: Mapping[Message, float], on: Mapping[str, str]) -> float:
    """Seconds that the fullest link needs, first for parameters, then for gradients; full duplex."""
    gbps = workload.link_gbps or USUAL_GBPS
    hosts = {shard.host for shard in plan.shards}
    secs = 0.0
    for from_hosts in (True, False):
        carried: dict[tuple[str, str], float] = defaultdict(float)
        for message, count in messages.items():
            sender, receiver = on[message.sender], on[message.receiver]
            if sender != receiver and (message.sender in hosts) == from_hosts:
                carried[sender, "out"] += count * message.nbytes
                carried[receiver, "in"] += count * message.nbytes
        secs += max(carried.values(), default=0.0) * 8 / (gbps * 1e9)
    return secs


def _measured_secs(plan: Plan, worker: Task, workload: Workload) -> float:
    """Of a worker's step, where it was measured how long an example takes; of replicas on GPUs, that of one."""
    examples = plan.replica_batch * (1 if worker.replicas[0].startswith("/gpu") else len(worker.replicas))
    return examples * (workload.example_ms or 0.0) / 1000


def _steps_of_a_worker(plan: Plan) -> float:
    """For one update."""
    return 1 / len(plan.workers) if plan.effective_strategy.waits_for_one else 1.0


def _pushes(plan: Plan) -> int:
    """Vectors that an update averages."""
    if plan.effective_strategy.is_one_process:
        return plan.replicas
    return 1 if plan.effective_strategy.waits_for_one else len(plan.workers)


def _calls_of_a_host(plan: Plan) -> int:
    if plan.effective_strategy.is_one_process:
        return 0  # the step's own
    return {"all": 1, "one": 2, "quorum": len(plan.workers) + plan.quorum_workers}[plan.effective_strategy.waits_for]
