"""Compares where a task's operations ran with the plan; checks everything that was planned. Pure."""

from collections.abc import Iterator

from trainer.config.words import count, some
from trainer.observe.placement.executed import COMPILED, Operation
from trainer.observe.placement.record import (
    STEP,
    UPDATE,
    PlacementRecord,
    group_by,
    pin_of,
    planned_replicas,
    replica_of,
    vectors,
)
from trainer.plan.plan import Plan, Task

EXAMPLES = 3  # names in a sentence that is about many operations


def differences(record: PlacementRecord, plan: Plan) -> list[str]:
    """Returns a sentence for each planned item that ran elsewhere, or not at all."""
    of_replicas = [*_of_replicas(record, plan), *_of_missing(record, plan)] if record.run == STEP else []
    return [*_of_shards(record, plan), *of_replicas]


def _of_shards(record: PlacementRecord, plan: Plan) -> Iterator[str]:
    for shard in plan.shards:
        host = record.task if shard.host == "worker" else shard.host  # under all_reduce each worker holds it
        if record.run == UPDATE and host != record.task:
            continue
        planned, variables = record.where(host, plan.parameters), vectors(record, plan, shard)
        if not variables:
            what = f"the parameters of shard {shard.index}"
            yield f"{what} were planned on {planned}, but nothing that {record.task} ran uses them"
        for vector in variables:
            if vector.device != planned:
                sentence = f"{vector.name} of shard {shard.index} was planned on {planned} but is on {vector.device}"
                yield sentence + _excuse(record, plan.task_named(host), planned, vector.device)


def _of_replicas(record: PlacementRecord, plan: Plan) -> Iterator[str]:
    """Yields operations that compute, but neither on their replica's device nor on that of their pinned layer."""
    everywhere = planned_replicas(plan)
    elsewhere: dict[tuple[str, str, str], list[Operation]] = {}
    for index, operations in group_by(replica_of, record.operations).items():
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
        were = f"{count(len(operations), 'operation')} of {whose} {'was' if len(operations) == 1 else 'were'}"
        names = some([f"{operation.name} ({operation.type})" for operation in operations], EXAMPLES)
        yield f"{were} planned on {planned} but ran on {ran}: {names}" + _excuse(
            record, plan.task_named(record.task), planned, ran
        )


def _of_missing(record: PlacementRecord, plan: Plan) -> Iterator[str]:
    """Yields replicas and pinned layers without operations, so that a check of nothing does not pass."""
    own = group_by(replica_of, [o for o in record.operations if o.computes])
    for index, (task, device) in enumerate(planned_replicas(plan)):
        if task != record.task:
            continue
        operations = own.get(index, [])
        if not operations:
            yield f"replica {index} was planned on {record.where(task, device)}, but none of its operations ran"
            continue
        compiled = next((o for o in operations if o.type == COMPILED), None)
        layers = {record.layer_of.get(o.name, "") for o in operations}
        for path, pin in plan.layers.items():
            if any(f"{layer}/".startswith(f"{path}/") for layer in layers):
                continue
            planned = f"layer {path} in replica {index} was planned on {record.where(task, pin)}"
            if compiled is not None:
                yield f"{planned} but was compiled into {compiled.name} on {compiled.device}; use train.jit=false"
            elif any(p.path.startswith(f"{path}/") for s in plan.shards for p in s.trainable):
                yield f"{planned}, but none of its operations ran"  # a layer without parameters may have none


def _excuse(record: PlacementRecord, task: Task, planned: str, ran: str) -> str:
    """Returns the likely reason, if soft placement explains it: every operation has a kernel for the CPU."""
    cpus = [record.where(task.name, f"/cpu:{index}") for index in range(task.cpus)]
    same_task = planned.rpartition("/")[0] == ran.rpartition("/")[0]
    if not (task.soft_placement and same_task and ran == cpus[0] and planned not in cpus):
        return ""
    return (
        "; soft placement moves operations to the CPU that have no kernel for their device, or whose device is missing"
        f" (device.soft_placement={{{task.name}:false}} makes that an error)"
    )
