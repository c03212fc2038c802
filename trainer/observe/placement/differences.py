"""How where a task's operations ran differs from the plan: nothing that was planned goes unchecked. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.observe.placement.executed import COMPILED, Operation
from trainer.observe.placement.record import STEP, UPDATE, Record, by, pin_of, planned_replicas, replica_of, vectors
from trainer.plan.plan import Plan, Task

EXAMPLES = 3  # names in a sentence that is about many operations


def differences(record: Record, plan: Plan) -> list[str]:
    """What ran elsewhere than planned, or not at all: one sentence each; none if all is as planned."""
    found = [*_of_shards(record, plan)]
    if record.run == STEP:
        found += [*_of_replicas(record, plan), *_of_missing(record, plan)]
    return found


def _of_shards(record: Record, plan: Plan) -> Iterator[str]:
    for shard in plan.shards:
        host = record.task if shard.host == "worker" else shard.host  # under all_reduce each worker holds it
        if record.run == UPDATE and host != record.task:
            continue
        planned, held = record.where(host, plan.parameters), vectors(record, plan, shard)
        if not held:
            what = f"the parameters of shard {shard.index}"
            yield f"{what} were planned on {planned}, and nothing that {record.task} ran touches them"
        for vector in held:
            if vector.device != planned:
                told = f"{vector.name}, of shard {shard.index}, was planned on {planned} and lives on {vector.device}"
                yield told + _excuse(record, plan.task(*_split(host)), planned, vector.device)


def _of_replicas(record: Record, plan: Plan) -> Iterator[str]:
    """Every operation of a replica that computes, on the replica's device or on that of its pinned layer."""
    everywhere = planned_replicas(plan)
    elsewhere: dict[tuple[str, str, str], list[Operation]] = {}
    for index, operations in by(replica_of, record.operations).items():
        if index >= len(everywhere):
            yield f"replica {index} ran in {record.task}; the plan has replicas 0..{len(everywhere) - 1}"
            continue
        task, device = everywhere[index]
        for operation in operations:
            layer = record.layer_of.get(operation.name)
            pin = None if layer is None else pin_of(plan, layer)
            planned = record.where(task, pin or device)
            if operation.computes and operation.device != planned:
                whose = f"layer {layer} in replica {index}" if pin else f"replica {index}"
                elsewhere.setdefault((whose, planned, operation.device), []).append(operation)
    for (whose, planned, ran), operations in elsewhere.items():
        count = "1 operation" if len(operations) == 1 else f"{len(operations)} operations"
        was = "was" if len(operations) == 1 else "were"
        told = f"{count} of {whose} {was} planned on {planned} and ran on {ran}: {_names(operations)}"
        yield told + _excuse(record, plan.task(*_split(record.task)), planned, ran)


def _of_missing(record: Record, plan: Plan) -> Iterator[str]:
    """Replicas and pinned layers of which nothing was seen, so that a check of nothing does not pass."""
    own = by(replica_of, [o for o in record.operations if o.computes])
    for index, (task, device) in enumerate(planned_replicas(plan)):
        if task != record.task:
            continue
        operations = own.get(index, [])
        if not operations:
            yield f"replica {index} was planned on {record.where(task, device)}, and no operation of it ran"
            continue
        compiled = next((o for o in operations if o.type == COMPILED), None)
        seen = {record.layer_of.get(o.name, "") for o in operations}
        for path, pin in plan.layers.items():
            if any(f"{layer}/".startswith(f"{path}/") for layer in seen):
                continue
            told = f"layer {path} in replica {index} was planned on {record.where(task, pin)}"
            if compiled is not None:
                yield f"{told} and was compiled into {compiled.name} on {compiled.device}; type train.jit=false"
            elif any(p.path.startswith(f"{path}/") for s in plan.shards for p in s.trainable):
                yield f"{told}, and no operation of it was found"  # a layer without parameters may have none


def _excuse(record: Record, task: Task, planned: str, ran: str) -> str:
    """The likely reason, where soft placement explains it; every kernel is there for a CPU."""
    there = [record.where(task.name, f"/cpu:{index}") for index in range(task.cpus)]
    same_task = planned.rpartition("/")[0] == ran.rpartition("/")[0]
    if not (task.soft_placement and same_task and ran == there[0] and planned not in there):
        return ""
    return (
        "; soft placement moves to the CPU what has no kernel on its device, or whose device is not there"
        f" (device.soft_placement={{{task.name}:false}} makes that an error)"
    )


def _names(operations: Sequence[Operation]) -> str:
    shown = ", ".join(f"{o.name} ({o.type})" for o in operations[:EXAMPLES])
    return shown + (f" and {len(operations) - EXAMPLES} more" if len(operations) > EXAMPLES else "")


def _split(task: str) -> tuple[str, int]:
    job, index = task.split(":")
    return job, int(index)
