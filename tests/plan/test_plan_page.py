"""A plan as it is printed and as JSON, without TensorFlow."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from trainer.faults.problems import Problem
from trainer.plan import page, traffic
from trainer.plan.layout import Parameter
from trainer.plan.placement import place
from trainer.plan.plan import Plan, Task

PARAMETERS = [
    Parameter("dense/kernel", (16, 20), True),  # 320 floats
    Parameter("dense/bias", (20,), True),  # 20 floats, padded to 32
    Parameter("norm/moving_mean", (), False),  # 1 float, padded to 16
]


def task(job: str, index: int, **fields: object) -> Task:
    facts = {"address": "127.0.0.1:0", "control": "127.0.0.1:0", "gpus": (), "memory_fraction": None}
    facts |= {"replicas": ("/cpu:0",) if job == "worker" else ()}
    return Task(job, index, **{**facts, "intra_op_threads": 1, "inter_op_threads": 2, **fields})  # type: ignore[arg-type]


def plan(*tasks: Task, parameters: list[Parameter] = PARAMETERS, warnings: tuple[Problem, ...] = ()) -> Plan:
    hosts = [t.name for t in tasks if t.job == "ps"] or [t.name for t in tasks]
    strategy = "local" if not tasks[0].address else "sync"
    return Plan("1ps2w", strategy, 300, 64, tasks, place(parameters, hosts, pins={}), 8000, warnings)


SMALL = plan(task("ps", 0), task("worker", 0, intra_op_threads=4), task("worker", 1, address="10.0.0.2:2222"))


def printed(capsys: pytest.CaptureFixture[str], shown: Plan) -> str:
    page.show(shown)
    return capsys.readouterr().out


def rows(text: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line.replace("┃", "│") for line in text.splitlines()]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_the_first_line_says_what_was_chosen_and_what_it_means(capsys, snapshot):
    first = printed(capsys, SMALL).splitlines()[0]
    assert first == snapshot


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_page_says_what_is_promised_of_the_order_of_examples(capsys, is_stream, snapshot):
    text = printed(capsys, dataclasses.replace(SMALL, is_stream=is_stream))
    assert [line for line in text.splitlines() if line.startswith("order of examples")] == snapshot


def test_every_task_has_a_row(capsys):
    assert rows(printed(capsys, SMALL))[:4] == [
        ["task", "address", "GPUs", "GPU memory", "threads", "replica batch", "log"],
        ["ps:0", "127.0.0.1, a free port", "none", "", "1 intra, 2 inter", "", "logs/ps-0.log"],
        ["worker:0 (chief)", "127.0.0.1, a free port", "none", "", "4 intra, 2 inter", "32", "logs/worker-0.log"],
        ["worker:1", "10.0.0.2:2222", "none", "", "1 intra, 2 inter", "32", "logs/worker-1.log"],
    ]


@pytest.mark.parametrize(
    ("fields", "memory"),
    [
        ({"memory_fraction": 0.45}, "45% each"),
        ({"memory_mib": 9000}, "9,000 MiB each"),
        ({"growth": True}, "grows"),
        ({}, "nearly all"),
    ],
)
def test_gpus_have_their_indices_and_the_memory_that_is_taken(capsys, fields, memory):
    shown = plan(task("ps", 0), task("worker", 0, gpus=(2, 3), **fields), task("worker", 1))
    assert rows(printed(capsys, shown))[2][2:4] == ["2, 3", memory]


def test_replicas_have_a_column_if_a_worker_has_more_than_one(capsys):
    own, in_turn = ("/cpu:0", "/cpu:1"), ("/gpu:0",) * 3
    shown = plan(task("ps", 0), task("worker", 0, replicas=own), task("worker", 1, replicas=in_turn))
    assert [row[5:7] for row in rows(printed(capsys, shown))[:4]] == [
        ["replicas", "replica batch"],
        ["", ""],
        ["/cpu:0 /cpu:1", "12"],
        ["3 on /gpu:0", "12"],
    ]


def test_one_process_has_no_address(capsys):
    shown = plan(task("worker", 0, address=""))
    assert rows(printed(capsys, shown))[1][:2] == ["worker:0 (chief)", "none, one process"]


def test_every_parameter_has_a_row_with_its_bytes_and_its_share(capsys):
    assert rows(printed(capsys, SMALL))[4:] == [
        ["host", "parameter", "shape", "bytes", "share"],
        ["ps:0", "3 parameters", "", "1.4 KiB", "100.0%"],  # 4 x (320 + 32 + 16) = 1472 bytes
        ["", "dense/kernel", "16x20", "1.2 KiB", "87.0%"],
        ["", "dense/bias", "20", "80 B", "8.7%"],
        ["", "norm/moving_mean (state)", "scalar", "4 B", "4.3%"],
    ]


def test_every_shard_has_a_row(capsys):
    shown = rows(printed(capsys, plan(task("ps", 0), task("ps", 1), task("worker", 0))))[5:]
    assert [row for row in shown if row[0]] == [
        ["ps:0", "1 parameter", "", "1.2 KiB", "87.0%"],
        ["ps:1", "2 parameters", "", "192 B", "13.0%"],
    ]


def test_a_name_in_brackets_is_shown_as_it_is(capsys):
    shown = plan(task("ps", 0), task("worker", 0), parameters=[Parameter("block[a]/kernel", (16,), True)])
    assert "block[a]/kernel" in printed(capsys, shown)


def test_an_address_in_brackets_is_shown_as_it_is(capsys):
    shown = plan(task("ps", 0, address="[fe80::1]:2222"), task("worker", 0))
    assert "[fe80::1]:2222" in printed(capsys, shown)


def test_batch_steps_and_traffic_are_shown(capsys, snapshot):
    # A link carries the shard there and back: 2 x 4 x (320 + 32 + 16, and 16 each for metrics and header) bytes.
    assert printed(capsys, SMALL).splitlines()[-5:-1] == snapshot


def test_shared_memory_is_shown(capsys, snapshot):
    shown = dataclasses.replace(SMALL, wire="memory")
    assert printed(capsys, shown).splitlines()[-2:] == snapshot


def test_one_process_sends_nothing(capsys):
    assert printed(capsys, plan(task("worker", 0, address=""))).splitlines()[-1] == "traffic: none"


def test_warnings_come_last(capsys):
    warned = plan(
        task("ps", 0), task("worker", 0), warnings=(Problem("cluster", "slow", "[slow] machine", "fewer workers"),)
    )
    assert printed(capsys, warned).splitlines()[-2:] == ["warning: cluster: [slow] machine", "    fewer workers"]


def test_the_fullest_link_has_the_vectors_of_all_workers():
    (shard,) = SMALL.shards
    assert traffic.narrowest(SMALL) == ("ps:0", 2 * shard.nbytes)  # to two workers
    spread = dataclasses.replace(SMALL, shards=place(PARAMETERS, ["worker:0", "worker:1"], pins={}))
    # Each worker sends its own shard to the other, and gradients of the other's.
    assert traffic.narrowest(spread)[1] == sum(shard.nbytes for shard in spread.shards)


def test_the_bound_is_shown_for_vectors_that_are_sent(capsys):
    (line,) = [line for line in printed(capsys, SMALL).splitlines() if "Gbit/s" in line]
    assert f"{1000 * 8 * traffic.narrowest(SMALL)[1] / 1e9:,.0f} ms" in line
    assert "Gbit/s" not in printed(capsys, dataclasses.replace(SMALL, wire="memory"))


def test_the_json_file_equals_the_plan(tmp_path):
    page.write_json(SMALL, str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(SMALL.to_json()))


def test_the_plan_can_be_read_back_from_the_json_file(tmp_path):
    page.write_json(SMALL, str(tmp_path / "plan.json"))
    assert Plan.from_json(json.loads((tmp_path / "plan.json").read_text())) == SMALL


def lines_at(shown: Plan, width: int) -> list[str]:
    """The page on a terminal of this width."""
    file = io.StringIO()
    page.show(shown, console=Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_terminal_of_80_columns_has_room_for_the_tables_without_logs_and_gpus_that_nobody_has():
    lines = lines_at(SMALL, 80)
    assert [line for line in lines[6:12] if line] == [
        " task              address                          threads  replica batch",
        " ─────────────────────────────────────────────────────────────────────────",
        " ps:0              127.0.0.1, a free port  1 intra, 2 inter",
        " worker:0 (chief)  127.0.0.1, a free port  4 intra, 2 inter             32",
        " worker:1          10.0.0.2:2222           1 intra, 2 inter             32",
    ]
    with_gpus = lines_at(plan(task("ps", 0), task("worker", 0, gpus=(2, 3)), task("worker", 1)), 80)
    assert "GPUs" in " ".join(with_gpus)


@pytest.mark.parametrize("width", [40, 60, 80, 109])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(width):
    lines = lines_at(SMALL, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for name in ("worker:0 (chief)", "dense/kernel", "norm/moving_mean"):
        assert any(name in line for line in lines)


def test_what_the_bits_depend_on_is_said(capsys):
    assert "result depends on: 2 replicas, 32 examples and 4 threads per replica\n" in printed(capsys, SMALL)
