"""The files of where the tasks of a run ran, together; without TensorFlow."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Mapping

from trainer.observe.placement import verify
from trainer.observe.placement.executed import Operation, Transfer
from trainer.observe.placement.record import STEP, UPDATE, PlacementRecord
from trainer.plan.layout import Parameter
from trainer.plan.placement import place
from trainer.plan.plan import Plan, Task

PARAMETERS = [Parameter("dense/kernel", (16, 20), True), Parameter("norm/moving_mean", (16,), False)]
PS, WORKER = "/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:0"


def task(job: str, index: int, *devices: str) -> Task:
    return Task(job, index, f"{job}{index}:2222", "", (), None, 1, 2, replicas=devices)


def plan(workers: int = 1) -> Plan:
    tasks = (task("ps", 0), *(task("worker", i, "/cpu:0") for i in range(workers)))
    shards = place(PARAMETERS, ["ps:0"], pins={})
    return Plan("1ps1w", "sync", 3, 8, tasks, shards, 96, (), layers={"dense": "/cpu:0"})


def operations(devices: Mapping[str, str]) -> tuple[Operation, ...]:
    kinds = {"flat": "VarHandleOp", "PartitionedCall": "compiled"}
    return tuple(
        Operation(name, kinds.get(name.rpartition("/")[2], "MatMul"), device, "replica" in name)
        for name, device in sorted(devices.items())
    )


UPDATED = PlacementRecord("ps:0", UPDATE, operations({"shard0/flat": PS, "update/PartitionedCall": PS}), ())
STEPPED = PlacementRecord(
    "worker:0",
    STEP,
    operations(
        {
            "shard0/flat": PS,
            "replica0/PartitionedCall/model/dense_1/MatMul": WORKER,
            "replica0/PartitionedCall/gradient_tape/model/dense_1/MatMul/MatMul": WORKER,
        }
    ),
    (Transfer(PS, WORKER, ("Read/ReadVariableOp",)),),
    {"model/dense_1": "dense"},
)


def test_the_parts_of_all_tasks_are_merged(tmp_path):
    verify.write(tmp_path, STEPPED, plan())
    assert json.loads((tmp_path / "placement.json").read_text())["as_planned"] is True
    verify.write(tmp_path, UPDATED, plan())
    told = json.loads((tmp_path / "placement.json").read_text())
    assert [(one["task"], one["run"], one["differences"]) for one in told["records"]] == [
        ("ps:0", "update", []),
        ("worker:0", "step", []),
    ]
    assert told["records"][1]["layers"] == [{"path": "dense", "planned": "/cpu:0", "devices": {WORKER: 2}}]
    assert told["records"][1]["devices"][WORKER][1] == {
        "name": "replica0/PartitionedCall/model/dense_1/MatMul",
        "type": "MatMul",
        "computes": True,
    }


def test_a_difference_is_in_the_file_too(tmp_path, snapshot):
    verify.write(tmp_path, PlacementRecord("ps:0", UPDATE, operations({"update/MatMul": PS}), ()), plan())
    told = json.loads((tmp_path / "placement.json").read_text())
    assert told["as_planned"] is False
    assert told["records"][0]["differences"] == snapshot


def test_the_part_of_a_task_of_an_earlier_cluster_is_ignored(tmp_path):
    verify.write(tmp_path, PlacementRecord("worker:7", STEP, (), ()), plan())
    verify.write(tmp_path, UPDATED, plan())
    assert [one["task"] for one in json.loads((tmp_path / "placement.json").read_text())["records"]] == ["ps:0"]


def test_tasks_that_write_at_once_lose_no_part(tmp_path):
    everyone = [PlacementRecord(f"worker:{i}", STEP, STEPPED.operations, ()) for i in range(4)]
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=verify.write, args=(tmp_path, r, plan(4))) for r in everyone[:2]]
    writers += [threading.Thread(target=verify.write, args=(tmp_path, r, plan(4))) for r in everyone[2:]]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    told = json.loads((tmp_path / "placement.json").read_text())
    assert [one["task"] for one in told["records"]] == ["worker:0", "worker:1", "worker:2", "worker:3"]
