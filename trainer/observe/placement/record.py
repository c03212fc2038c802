"""Derives where a task's parameters, replicas and layers ran. Pure: no TensorFlow.

Names of operations decide: `shard0/flat` and `shard0/slots/...` are the vectors of a shard (`flat` and `slots/...` in
one process), `.../replica3/...` is an operation of replica 3, and `.../model/dense_1/...` one of the layer that was
called in this scope, forward or backward (`.../gradient_tape/model/dense_1/...`).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainer.observe.placement.executed import COMPILED, Executed, Operation, Transfer, short
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan

Key = TypeVar("Key")
STEP, UPDATE = "step", "update"  # of a worker's replicas; of a shard host


@dataclass(frozen=True)
class PlacementRecord:
    """The devices of the operations of one `Session.run`."""

    task: str  # whose session it was, "worker:0"
    run: str  # STEP or UPDATE
    operations: tuple[Operation, ...]
    transfers: tuple[Transfer, ...]
    scopes: Mapping[str, str] = field(default_factory=dict)  # layer path by the scope of its call, "model/dense_1"

    @property
    def devices(self) -> dict[str, list[Operation]]:
        """Counts operations by device."""
        devices: dict[str, list[Operation]] = {}
        for operation in self.operations:
            devices.setdefault(operation.device, []).append(operation)
        return dict(sorted(devices.items()))

    @functools.cached_property
    def layer_of(self) -> dict[str, str]:
        """Returns the layer path of an operation's name; of nested scopes, the innermost counts."""
        innermost = sorted(self.scopes, key=len, reverse=True)
        scope_of = {o.name: next((s for s in innermost if f"/{s}/" in f"/{o.name}/"), None) for o in self.operations}
        return {name: self.scopes[scope] for name, scope in scope_of.items() if scope is not None}

    def where(self, task: str, device: str) -> str:
        """Returns a device as this record names it: a session without a cluster knows no tasks."""
        if task == self.task and not any(o.device.startswith("/job:") for o in self.operations):
            return short(device)
        job, _, index = task.partition(":")
        return short(device, f"/job:{job}/task:{index}")

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """Returns everything, and what follows from the plan, for readers without this program."""
        devices = {d: [_operation_to_json(o) for o in operations] for d, operations in self.devices.items()}
        return {
            "task": self.task,
            "run": self.run,
            "parameters": parameters(self, plan),
            "replicas": replicas(self, plan),
            "layers": layers(self, plan),
            "transfers": [{**t._asdict(), "count": len(t.tensors)} for t in self.transfers],
            "scopes": dict(self.scopes),
            "devices": devices,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PlacementRecord:
        operations = [Operation(**{**o, "device": d}) for d, own in value["devices"].items() for o in own]
        transfers = [Transfer(t["source"], t["target"], tuple(t["tensors"])) for t in value["transfers"]]
        return cls(value["task"], value["run"], tuple(sorted(operations)), tuple(transfers), value["scopes"])


def make_record(
    task: str,
    run: str,
    ran: Executed,
    *,
    scopes: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> PlacementRecord:
    """Returns a task's record of one `Session.run`.

    Args:
        run: STEP or UPDATE.
        scopes: layer path by scope, as `get_name_scope()` gives it inside the layer's call. A scope is not the layer's
            name: TensorFlow calls that of `dense` "dense_1" if the name is taken, and that may also be a layer's name.
            Layers without a scope are not distinguished.
        variables: `variable.device` by name ("flat", "slots/momentum") of a function that is called eagerly, where
            variables are not operations.
    """
    handles = [Operation(name, "VarHandleOp", short(device)) for name, device in (variables or {}).items()]
    return PlacementRecord(task, run, tuple(sorted([*ran.operations, *handles])), ran.transfers, dict(scopes or {}))


def replica_of(name: str) -> int | None:
    """Returns the replica that an operation belongs to, among all of the run."""
    match = re.search(r"(?:^|/)replica(\d+)(?:_\d+)?/", name)
    return int(match[1]) if match else None


def is_backward(name: str) -> bool:
    return "gradient_tape/" in name


def parameters(record: PlacementRecord, plan: Plan) -> list[dict[str, Any]]:
    """Returns the device of each parameter in the shards of this session; a part also has its first float."""
    return [
        {"path": piece.path, "shape": list(piece.shape), "bytes": 4 * piece.size, "shard": shard.index}
        | ({"begin": piece.begin} if piece.is_part else {})
        | {"device": variables[0].device}
        for shard in plan.shards
        if (variables := vectors(record, plan, shard))
        for piece in (*shard.trainable, *shard.state)
    ]


def replicas(record: PlacementRecord, plan: Plan) -> list[dict[str, Any]]:
    """Returns where each replica of this session ran: operations by device, forward and backward."""
    own = group_by(replica_of, record.operations)
    return [
        {
            "index": index,
            "planned": record.where(*planned_replicas(plan)[index]) if index < plan.replicas else None,
            "devices": dict(sorted(Counter(o.device for o in own[index]).items())),
            "backward": sum(is_backward(o.name) for o in own[index]),
            "compiled": sum(o.holds for o in own[index] if o.type == COMPILED) or None,
        }
        for index in sorted(own)
    ]


def layers(record: PlacementRecord, plan: Plan) -> list[dict[str, Any]]:
    """Returns where each layer with a scope ran: operations by device, over this session's replicas."""
    own = group_by(record.layer_of.get, record.operations)
    return [
        {
            "path": path,
            "planned": pin_of(plan, path),
            "devices": dict(sorted(Counter(o.device for o in own.get(path, ())).items())),
        }
        for path in dict.fromkeys(record.scopes.values())
    ]


def vectors(record: PlacementRecord, plan: Plan, shard: Shard) -> list[Operation]:
    """Returns the variables that hold a shard: its parameters, optimizer slots, and copies of both."""
    prefix = f"shard{shard.index}/"
    name = re.compile(rf"({prefix}){'?' if len(plan.shards) == 1 else ''}(held/)?(flat|slots/.+)")
    return [o for o in record.operations if o.type == "VarHandleOp" and name.fullmatch(o.name)]


def planned_replicas(plan: Plan) -> list[tuple[str, str]]:
    """Returns (task, device) of every replica of the run, in order."""
    return [(task.name, device) for task in plan.workers for device in task.replicas]


def pin_of(plan: Plan, path: str) -> str | None:
    """Returns the device of a layer, or of the nearest layer around it that has one."""
    while path and path not in plan.layers:
        path = path.rpartition("/")[0]
    return plan.layers.get(path)


def group_by(key: Callable[[str], Key | None], operations: Iterable[Operation]) -> dict[Key, list[Operation]]:
    """Groups operations by `key` of their names, without those whose key is None."""
    groups: dict[Key, list[Operation]] = {}
    for operation in operations:
        if (group := key(operation.name)) is not None:
            groups.setdefault(group, []).append(operation)
    return groups


def _operation_to_json(operation: Operation) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": operation.name, "type": operation.type}
    return plain | {key: value for key in ("computes", "holds") if (value := getattr(operation, key))}
