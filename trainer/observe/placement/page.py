"""Renders where a run ran as one HTML page, by the template page.html.j2. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.observe.html import template
from trainer.observe.placement.differences import differences
from trainer.observe.placement.executed import COMPILED, Operation
from trainer.observe.placement.record import STEP, UPDATE, PlacementRecord, layers, replicas, vectors
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task

FIRST_HUE, GOLDEN_ANGLE = 250.0, 137.508  # degrees; neighbours in the legend are far apart, for any number of devices
SCOPE_DEPTH = 4  # "replica0/gradient_tape/model/dense_1"
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def page(records: Sequence[PlacementRecord], plan: Plan) -> str:
    """Renders the page of the records written so far, in the order of the plan's tasks."""
    by_device = _operations_by_device(records)
    by_layer = _layers(records, plan)
    return template("placement/page.html.j2").render(
        plan=plan,
        hues={device: f"{(FIRST_HUE + i * GOLDEN_ANGLE) % 360:.0f}" for i, device in enumerate(by_device)},
        differences=[(record.task, text) for record in records for text in differences(record, plan)],
        missing=_missing(records, plan),
        checked=sum(o.computes for record in records for o in record.operations),
        operations_by_device=by_device,
        tasks=[_task(task, records, plan) for task in plan.tasks],
        most_operations=max((len(record.operations) for record in records), default=0),
        shards=[_shard(shard, records, plan) for shard in plan.shards],
        parameter_nbytes=sum(_nbytes(shard) for shard in plan.shards),
        replicas=[(record.task, replica) for record in records for replica in replicas(record, plan)],
        layers=by_layer,
        most_in_layer=max((sum(layer["devices"].values()) for layer in by_layer), default=0),
        transfers=[(record, transfer) for record in records for transfer in record.transfers],
        operations=[(record, list(_scopes_by_device(record))) for record in records],
    )


def _missing(records: Sequence[PlacementRecord], plan: Plan) -> list[str]:
    """Records that are still to come."""
    written = {(record.task, record.run) for record in records}
    due = [(task.name, STEP) for task in plan.workers] + [(host, UPDATE) for host in plan.hosts]
    return [f"{task}, one {run}" for task, run in due if (task, run) not in written]


def _operations_by_device(records: Sequence[PlacementRecord]) -> dict[str, int]:
    """How many operations ran on each device, also on those that only sent or received tensors."""
    counts = Counter(o.device for record in records for o in record.operations)
    for record in records:
        counts.update({device: 0 for t in record.transfers for device in (t.source, t.target)})
    return dict(sorted(counts.items()))


def _task(task: Task, records: Sequence[PlacementRecord], plan: Plan) -> dict[str, Any]:
    roles = [*(["chief"] if task.is_chief else []), *(f"shard {s.index}" for s in plan.shards if s.host == task.name)]
    own = [
        {"run": record.run, "counts": {device: len(operations) for device, operations in record.devices.items()}}
        for record in records
        if record.task == task.name
    ]
    return {"name": task.name, "role": ", ".join(roles), "records": own}


def _shard(shard: Shard, records: Sequence[PlacementRecord], plan: Plan) -> dict[str, Any]:
    own = [record for record in records if shard.host in (record.task, "worker")] or records
    pieces = [*((piece, "") for piece in shard.trainable), *((piece, " (state)") for piece in shard.state)]
    devices = dict.fromkeys(o.device for record in own for o in vectors(record, plan, shard))
    return {"index": shard.index, "devices": list(devices), "pieces": pieces, "nbytes": _nbytes(shard)}


def _nbytes(shard: Shard) -> int:
    return sum(4 * piece.size for piece in (*shard.trainable, *shard.state))


def _layers(records: Sequence[PlacementRecord], plan: Plan) -> list[dict[str, Any]]:
    """Every layer once, with its operations by device over all replicas."""
    merged: dict[str, dict[str, Any]] = {}
    for record in records:
        for layer in layers(record, plan):
            first = merged.setdefault(layer["path"], {**layer, "devices": Counter()})
            first["devices"].update(layer["devices"])
    return [{**layer, "devices": dict(sorted(layer["devices"].items()))} for layer in merged.values()]


def _scopes_by_device(record: PlacementRecord) -> Iterator[tuple[str, int, dict[str, list[str]]]]:
    """(device, number of its operations, their lines by scope)."""
    for device, operations in record.devices.items():
        scopes = _by_scope(operations)
        yield device, len(operations), {scope: list(_lines(scopes[scope])) for scope in sorted(scopes)}


def _by_scope(operations: Sequence[Operation]) -> dict[str, list[Operation]]:
    """Operations by scope; where none of a scope computes, they are listed with those around them."""
    scopes: dict[str, list[Operation]] = {}
    for operation in operations:
        parts = [part for part in operation.name.split("/")[:-1] if part not in CALLS]
        scopes.setdefault("/".join(parts[:SCOPE_DEPTH]), []).append(operation)
    for scope in sorted(scopes, key=lambda scope: -scope.count("/")):
        if scope and not any(o.computes for o in scopes[scope]):
            scopes.setdefault(scope.rpartition("/")[0], []).extend(scopes.pop(scope))
    return scopes


def _lines(operations: Sequence[Operation]) -> Iterator[str]:
    width = max(len(o.type) for o in operations)
    for o in sorted(operations):
        compiled = f"  ({o.holds} operations in one)" if o.type == COMPILED and o.holds else ""
        yield f"{o.type:<{width}}  {o.name}{compiled}"
