"""The page of where a run ran, and the files of its tasks together; without TensorFlow."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
from collections.abc import Mapping
from html.parser import HTMLParser

from trainer.observe.placement import files
from trainer.observe.placement.executed import Operation, Transfer
from trainer.observe.placement.page import page
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


class Reader(HTMLParser):
    """The text of a page by section, and what its tags refer to; fails on tags that do not close."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = [""]
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag == "section":
            self.ids.append(told["id"] or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.setdefault(self.ids[-1], []).append(data.strip())


def test_the_page_needs_no_other_file():
    read = Reader(page([UPDATED, STEPPED], plan()))
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert read.links == ["#devices", "#tasks", "#parameters", "#replicas", "#layers", "#transfers", "#operations"]
    assert read.ids[1:] == [link[1:] for link in read.links]
    assert "@import" not in page([UPDATED, STEPPED], plan())


def test_it_says_first_whether_all_is_as_planned():
    read = Reader(page([UPDATED, STEPPED], plan()))
    assert (
        read.texts[""][1:5]
        == ["Where it ran", "1ps1w", ": sync, 1 replica, global batch 8, shards on 1 ps", "As planned"]
        or "As planned" in read.texts[""]
    )
    assert not any("difference" in text for text in read.texts[""])


def test_it_says_first_what_is_not_as_planned():
    moved = PlacementRecord("worker:0", STEP, operations({"shard0/flat": WORKER, "replica0/dense/MatMul": WORKER}), ())
    read = Reader(page([UPDATED, moved], plan()))
    assert "2 differences from the plan" in read.texts[""]
    assert f"shard0/flat of shard 0 was planned on {PS} but is on {WORKER}" in read.texts[""]


def test_it_says_which_tasks_have_no_record_yet():
    read = Reader(page([STEPPED], plan(workers=2)))
    assert "As planned, so far" in read.texts[""]
    assert "No record yet of: worker:1, one step, ps:0, one update." in read.texts[""]
    assert "no record" in read.texts["tasks"]


def test_each_device_has_one_colour_of_its_own():
    text = page([UPDATED, STEPPED], plan())
    colors = set(re.findall(r'<span class="chip" style="--hue:(\d+)" title="([^"]+)">', text))
    assert colors == {("250", PS), ("28", WORKER)}


def test_parameters_replicas_layers_and_transfers_are_listed_with_their_devices():
    texts = Reader(page([UPDATED, STEPPED], plan())).texts
    assert texts["parameters"] == [
        *["Parameters", "shard 0", "ps:0 /cpu:0", "2 parameters, 1.3 KiB, 100% of the parameters"],
        *["parameter", "shape", "bytes"],
        *["dense/kernel", "16×20", "1.2 KiB"],
        *["norm/moving_mean", "(state)", "16", "64 B"],
    ]
    assert texts["replicas"][6:] == [*["replica 0", "worker:0", "worker:0 /cpu:0", "worker:0 /cpu:0", "2", "1", "1"]]
    assert texts["layers"][4:] == ["dense", "/cpu:0", "worker:0 /cpu:0", "2"]
    assert texts["transfers"][6:] == [
        *["worker:0", "step", "ps:0 /cpu:0", "→", "worker:0 /cpu:0", "between tasks", "1 tensor"],
        "Read/ReadVariableOp",
    ]


def test_operations_are_listed_by_device_and_scope():
    texts = Reader(page([STEPPED], plan())).texts["operations"]
    assert texts[texts.index("worker:0 /cpu:0") :] == [
        *["worker:0 /cpu:0", "2", "in 2 scopes"],
        *["replica0/gradient_tape/model/dense_1", "1"],
        "MatMul  replica0/PartitionedCall/gradient_tape/model/dense_1/MatMul/MatMul",
        *["replica0/model/dense_1", "1"],
        "MatMul  replica0/PartitionedCall/model/dense_1/MatMul",
    ]


def test_names_are_no_markup():
    record = PlacementRecord("worker:0", STEP, operations({"replica0/<b>&/MatMul": WORKER, "shard0/flat": PS}), ())
    assert "replica0/<b>&" in Reader(page([record], plan())).texts["operations"]


# Files


def test_the_parts_of_all_tasks_are_merged(tmp_path):
    files.write(tmp_path, STEPPED, plan())
    assert json.loads((tmp_path / "placement.json").read_text())["as_planned"] is True
    files.write(tmp_path, UPDATED, plan())
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
    assert (tmp_path / "placement.html").read_text() == page([UPDATED, STEPPED], plan())


def test_a_difference_is_in_the_file_too(tmp_path):
    files.write(tmp_path, PlacementRecord("ps:0", UPDATE, operations({"update/MatMul": PS}), ()), plan())
    told = json.loads((tmp_path / "placement.json").read_text())
    assert told["as_planned"] is False
    assert told["records"][0]["differences"] == [
        f"the parameters of shard 0 were planned on {PS}, and nothing that ps:0 ran touches them"
    ]


def test_the_part_of_a_task_of_an_earlier_cluster_is_ignored(tmp_path):
    files.write(tmp_path, PlacementRecord("worker:7", STEP, (), ()), plan())
    files.write(tmp_path, UPDATED, plan())
    assert [one["task"] for one in json.loads((tmp_path / "placement.json").read_text())["records"]] == ["ps:0"]


def test_tasks_that_write_at_once_lose_no_part(tmp_path):
    everyone = [PlacementRecord(f"worker:{i}", STEP, STEPPED.operations, ()) for i in range(4)]
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=files.write, args=(tmp_path, r, plan(4))) for r in everyone[:2]]
    writers += [threading.Thread(target=files.write, args=(tmp_path, r, plan(4))) for r in everyone[2:]]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    told = json.loads((tmp_path / "placement.json").read_text())
    assert [one["task"] for one in told["records"]] == ["worker:0", "worker:1", "worker:2", "worker:3"]
