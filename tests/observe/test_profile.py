"""profile=true: clocks, traces and shares from what tasks write down, and real runs with and without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import page
from runs import Run, free_ports

from trainer.config import help_page
from trainer.faults import exit_codes
from trainer.observe.profile import clock, record, shares
from trainer.observe.profile.__main__ import main
from trainer.observe.profile.attempts import Interval, Profile, read
from trainer.observe.profile.clock import Offset, best, estimate
from trainer.observe.profile.merge import describe, merge
from trainer.observe.profile.record import REPLICA, SHARD, Recorder
from trainer.observe.profile.stamps import Stamps
from trainer.observe.profile.trace import trace
from trainer.observe.status import serve
from trainer.plan.plan import Plan, Task
from trainer.storage.run_directory import RunDirectory

PHASES = ["wait", "pull", "input", "compute", "push"]

# Clocks


def test_the_offset_is_what_the_chief_says_at_the_middle_of_a_request():
    assert estimate(asked_at=10.0, chief_at=3612.5, answered_at=13.0) == Offset(3601.0, 1.5)


def test_the_request_with_the_least_round_trip_counts():
    slow, quick = estimate(10.0, 12.0, 13.0), estimate(20.0, 20.75, 20.5)
    assert best([slow, quick]) == quick == Offset(0.5, 0.25)
    assert best([]) is None


@pytest.mark.parametrize(("secs", "applied"), [(0.2, 0.0), (-0.2, 0.0), (0.31, 0.31), (-3600.0, -3600.0)])
def test_clocks_that_may_be_one_are_taken_for_one(secs: float, applied: float):
    assert Offset(secs, error_secs=0.3).applied_secs == applied


def test_each_better_estimate_of_the_chiefs_clock_is_reported(monkeypatch):
    status, (port,) = page(), free_ports(1)
    as_of_now = status.as_of_now
    monkeypatch.setattr(status, "as_of_now", lambda: replace(as_of_now(), now=as_of_now().now + 3600.0))
    monkeypatch.setattr(clock, "POLL_EVERY_SECS", 0.0)
    serve(status, "127.0.0.1", port)
    told: list[Offset] = []
    clock.follow(f"127.0.0.1:{port}", told.append)
    errors = [offset.error_secs for offset in told]
    assert errors == sorted(errors, reverse=True)
    assert abs(told[-1].secs - 3600.0) <= told[-1].error_secs


def test_a_chief_that_does_not_answer_leaves_no_estimate(monkeypatch):
    monkeypatch.setattr(clock, "POLL_EVERY_SECS", 0.0)
    told: list[Offset] = []
    clock.follow(f"127.0.0.1:{free_ports(1)[0]}", told.append)
    assert told == []


# From what tasks wrote to steps on one clock


def born(task: str, pid: int = 1) -> dict[str, Any]:
    return {"task": task, "pid": pid}


def step(number: int, began: float, ended: float, **ends: Any) -> dict[str, Any]:
    return {"row": REPLICA, "step": number, "began": began, "ended": ended, "ends": ends, "arrived": {}}


def update(number: int, began: float, ended: float, arrived: Mapping[str, float], **ends: Any) -> dict[str, Any]:
    return {"row": SHARD, "step": number, "began": began, "ended": ended, "ends": ends, "arrived": dict(arrived)}


def read_lines(**tasks: list[Any]) -> Profile:
    """Of files by task, `ps_0` for ps:0; a line that is text stays as it is."""
    files = {
        name.replace("_", ":"): "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        for name, lines in tasks.items()
    }
    return read(files, expected=["ps:0", "worker:0", "worker:1"])


def only_step(profile: Profile, row: str = REPLICA) -> Any:
    ((attempt, *_),) = [profile.attempts]
    return attempt.rows[row][0]


def test_a_phase_begins_where_the_one_before_it_ended():
    found = only_step(read_lines(worker_0=[born("worker:0"), step(7, 10.0, 15.0, wait=11.0, compute=14.0)]))
    assert (found.number, found.began, found.ended) == (7, 10.0, 15.0)
    assert found.spans == (Interval("wait", 10.0, 11.0), Interval("compute", 11.0, 14.0))


def test_a_batch_that_arrived_before_the_parameters_was_not_waited_for():
    found = only_step(read_lines(worker_0=[born("worker:0"), step(1, 10.0, 15.0, pull=12.0, input=10.5, compute=14.0)]))
    assert found.spans[1:] == (Interval("input", 12.0, 12.0), Interval("compute", 12.0, 14.0))


def test_what_hosts_stamped_is_put_on_the_chiefs_clock():
    ends = {"wait": {"ps:0": 111.0, "worker:0": 10.5}, "compute": 14.0, "push": {"ps:0": 114.5, "ps:0/1": 115.0}}
    offset = {"offset_secs": -100.0, "error_secs": 0.001}
    profile = read_lines(
        ps_0=[
            born("ps:0"),
            {"offset_secs": -101.0, "error_secs": 2.0},
            offset,
            update(1, 110.0, 116.0, {}, wait=115.5),
        ],
        worker_0=[born("worker:0"), step(1, 10.0, 16.0, **ends)],
    )
    ps, worker = profile.attempts
    assert ps.rows[SHARD][0].spans == (Interval("wait", 10.0, 15.5),)
    assert worker.rows[REPLICA][0].spans == (
        Interval("wait", 10.0, 11.0),
        Interval("compute", 11.0, 14.0),
        Interval("push", 14.0, 15.0),
    )
    assert profile.offsets == {"ps:0": Offset(-100.0, 0.001)}


def test_a_clock_that_cannot_be_right_makes_no_phase_negative():
    ends = {"wait": {"ps:0": 5.0}, "compute": 14.0, "push": {"ps:0": 90.0}}
    found = only_step(read_lines(worker_0=[born("worker:0"), step(1, 10.0, 15.0, **ends)]))
    assert found.spans == (Interval("wait", 10.0, 10.0), Interval("compute", 10.0, 14.0), Interval("push", 14.0, 15.0))


def test_the_line_that_a_killed_task_did_not_finish_is_left_out_and_counted():
    whole = [born("worker:0"), step(1, 0.0, 1.0, wait=0.5), step(2, 1.0, 2.0, wait=1.5)]
    profile = read_lines(worker_0=[*whole, json.dumps(step(3, 2.0, 3.0, wait=2.5))[:-20]])
    assert [s.number for s in profile.attempts[0].rows[REPLICA]] == [1, 2]
    assert profile.damaged == 1


@pytest.mark.parametrize(
    "line",
    ["[]", "7", "null", '{"row": "replica"}', json.dumps(step(1, 0.0, 1.0, wait="soon")), "\x00\x00"],
    ids=["list", "number", "null", "no times", "text", "zeros"],
)
def test_a_line_of_something_else_is_left_out_and_counted(line: str):
    profile = read_lines(worker_0=[born("worker:0"), line, step(2, 1.0, 2.0, wait=1.5)])
    assert [s.number for s in profile.attempts[0].rows[REPLICA]] == [2]
    assert profile.damaged == 1


def test_tasks_that_recorded_nothing_are_named():
    profile = read_lines(ps_0=[born("ps:0")], worker_0=[born("worker:0"), step(1, 0.0, 1.0, wait=0.5)])
    assert profile.missing == ["ps:0", "worker:1"]


def test_each_process_of_a_task_is_an_attempt():
    lines = [born("worker:1", 70), step(1, 0.0, 1.0, wait=0.5), born("worker:1", 71), step(2, 5.0, 6.0, wait=5.5)]
    profile = read_lines(worker_1=lines)
    assert [(attempt.task, attempt.number, attempt.pid) for attempt in profile.attempts] == [
        ("worker:1", 0, 70),
        ("worker:1", 1, 71),
    ]
    names = [e["args"]["name"] for e in trace(profile.attempts)["traceEvents"] if e["name"] == "process_name"]
    assert names == ["worker:1", "worker:1, attempt 2"]


# Traces


def check_trace(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the events that take time, all of which are whole and nest within their thread."""
    open_until = defaultdict(list)
    events = [event for event in made["traceEvents"] if event["ph"] != "M"]
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert (event["ph"], event["ts"] >= 0, event["dur"] >= 0) == ("X", True, True)
        outer = open_until[event["pid"], event["tid"]]
        while outer and outer[-1] <= event["ts"]:
            outer.pop()
        assert all(event["ts"] + event["dur"] <= end for end in outer), event
        outer.append(event["ts"] + event["dur"])
    return events


def test_a_trace_has_a_process_per_attempt_and_a_thread_per_row():
    lines = [
        born("worker:0"),
        step(3, 100.0, 101.0, wait=100.25),
        update(3, 100.5, 101.5, {"worker:0": 100.75, "worker:1": 101.0}, wait=101.0, apply=101.25),
    ]
    made = trace(read_lines(worker_0=lines).attempts)
    assert [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]) for e in check_trace(made)] == [
        ("step 3", 1, 0, 1000000, {"step": 3}),
        ("wait", 1, 0, 250000, {"step": 3}),
        ("update 3", 2, 500000, 1000000, {"step": 3}),
        ("wait", 2, 500000, 500000, {"step": 3, "last": "worker:1", "came_ms": {"worker:0": 0.0, "worker:1": 250.0}}),
        ("apply", 2, 1000000, 250000, {"step": 3}),
    ]
    named = [(e["name"], e["tid"], e["args"].get("name")) for e in made["traceEvents"] if e["ph"] == "M"]
    assert named == [
        ("process_name", 0, "worker:0"),
        ("process_sort_index", 0, None),
        ("thread_name", 1, REPLICA),
        ("thread_name", 2, SHARD),
    ]


def test_a_trace_of_nothing_is_a_trace():
    assert trace([])["traceEvents"] == []


# Shares


def two_workers() -> Profile:
    """Three steps; in the first of each, which does not count, everything takes long."""
    arrivals = [{"worker:0": 9.0, "worker:1": 5.0}, {"worker:0": 10.5, "worker:1": 10.75}, {"worker:1": 11.5}]
    return read_lines(
        ps_0=[
            born("ps:0"),
            update(1, 0.0, 10.0, arrivals[0], wait=9.0, apply=10.0),
            update(2, 10.0, 11.0, arrivals[1], wait=10.75, apply=11.0),
            update(3, 11.0, 12.0, arrivals[1] | {"worker:0": 11.0, "worker:1": 11.25}, wait=11.5, apply=12.0),
            update(4, 12.0, 12.0, arrivals[2], wait=12.0, apply=12.0),
        ],
        worker_0=[
            born("worker:0"),
            step(1, 0.0, 10.0, wait=9.0, compute=10.0),
            step(2, 10.0, 11.0, wait=10.25, compute=11.0),
            step(3, 11.5, 12.0, wait=11.5, compute=11.75),
        ],
    )


def test_shares_are_of_the_time_from_the_second_step_to_the_end_of_the_last():
    assert shares.fractions(two_workers().attempts, REPLICA) == {
        "worker:0": {"wait": 0.125, "compute": 0.5, "other": 0.375}
    }
    assert shares.fractions(two_workers().attempts, SHARD) == {"ps:0": {"wait": 0.625, "apply": 0.375, "other": 0.0}}


def test_the_shares_of_several_attempts_are_combined():
    first = [born("worker:1"), step(1, 0.0, 9.0), step(2, 9.0, 10.0, wait=10.0)]
    second = [born("worker:1"), step(2, 50.0, 59.0), step(3, 59.0, 62.0, wait=60.0, compute=62.0)]
    summary = shares.summarize(read_lines(worker_1=[*first, *second]))
    assert summary["fractions"] == {"worker:1": {"wait": 0.5, "compute": 0.5, "other": 0.0}}
    assert summary["steps"] == 2


def test_who_came_last_counts_where_several_came():
    assert shares.came_last(two_workers().attempts) == {"worker:1": {"updates": 2, "of": 2, "late_ms": 250.0}}


def test_the_summary_is_a_table_of_shares_and_says_who_came_last(snapshot):
    profile = two_workers()
    moved = Profile(
        profile.attempts, {"ps:0": Offset(-2.5, 0.0004), "worker:1": Offset(0.0, 0.001)}, profile.missing, 0
    )
    assert shares.describe(shares.summarize(moved)).splitlines() == snapshot


def test_of_many_workers_that_came_last_three_are_named(snapshot):
    last = {f"worker:{i}": {"updates": 9 - i, "of": 30, "late_ms": 1.5} for i in range(4)}
    told = shares.summarize(read({}, expected=[])) | {"came_last": last, "fractions": {"worker:0": {"other": 1.0}}}
    assert shares.describe(told).splitlines()[-1] == snapshot


def test_without_a_second_step_there_are_no_shares(snapshot):
    profile = read_lines(worker_0=[born("worker:0"), step(1, 0.0, 1.0, wait=0.5)])
    assert shares.describe(shares.summarize(profile)) == snapshot


# Files


def task(job: str, index: int) -> Task:
    return Task(job, index, "", "127.0.0.1:1", (), None, 1, 2, cpus=1, replicas=("/cpu:0",))


def prepared(path: Path) -> RunDirectory:
    """A run directory with the plan of one ps and two workers."""
    tasks = (task("ps", 0), task("worker", 0), task("worker", 1))
    path.mkdir()
    directory = RunDirectory(path)
    plan = Plan("1ps2w", "sync", 3, 8, tasks, (), 8, ())
    directory.plan.write_text(json.dumps(plan.to_json()))
    return directory


def test_a_recorder_writes_its_attempt_and_the_first_steps_of_each_row(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(record, "STEPS", 2)
    directory, chief = prepared(tmp_path / "run"), task("worker", 0)
    for _ in range(2):
        recorder = Recorder(directory, chief, chief)
        for number in (1, 2, 3):
            recorder.write(REPLICA, number, Stamps(1.0, 3.0, {"wait": {"ps:0": 2.0}}))
        recorder.write(SHARD, 1, Stamps(1.0, 3.0, {"wait": 2.0}, {"worker:1": 1.5}))
    text = (directory.profile / "worker-0.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line]
    assert lines[: len(lines) // 2] == [
        born("worker:0", os.getpid()),
        step(1, 1.0, 3.0, wait={"ps:0": 2.0}),
        step(2, 1.0, 3.0, wait={"ps:0": 2.0}),
        update(1, 1.0, 3.0, {"worker:1": 1.5}, wait=2.0),
    ]
    assert lines[len(lines) // 2 :] == lines[: len(lines) // 2]


def test_an_attempt_after_one_that_ended_within_a_line_is_separate(tmp_path: Path):
    directory, chief = prepared(tmp_path / "run"), task("worker", 0)
    Recorder(directory, chief, chief).write(REPLICA, 1, Stamps(1.0, 3.0, {"wait": 2.0}))
    path = directory.profile / "worker-0.jsonl"
    path.write_text(path.read_text() + '{"row": "repl')
    Recorder(directory, chief, chief).write(REPLICA, 2, Stamps(5.0, 6.0, {"wait": 5.5}))
    profile = read({"worker:0": path.read_text()}, expected=[])
    assert [[s.number for s in attempt.rows[REPLICA]] for attempt in profile.attempts] == [[1], [2]]
    assert profile.damaged == 1


def test_a_recorder_without_a_run_directory_says_so_once(tmp_path: Path, caplog, snapshot):
    recorder = Recorder(RunDirectory(tmp_path / "none"), task("ps", 0), task("worker", 0))
    for number in (1, 2):
        recorder.write(SHARD, number, Stamps(1.0, 2.0, {}))
    assert caplog.messages == snapshot
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_that_cannot_write_does_not_stop_the_task(tmp_path: Path, caplog):
    directory = prepared(tmp_path / "run")
    directory.profile.write_text("")
    Recorder(directory, task("ps", 0), task("worker", 0)).write(SHARD, 1, Stamps(1.0, 2.0, {}))
    assert caplog.messages == [f"ps:0 is not profiled: {directory.profile}: File exists"]


def test_the_files_of_all_tasks_become_a_trace_and_a_summary(tmp_path: Path):
    directory = prepared(tmp_path / "run")
    directory.profile.mkdir()
    lines = [born("worker:0"), step(1, 0.0, 1.0, wait=0.5), step(2, 1.0, 2.0, wait=1.5)]
    text = "\n".join(map(json.dumps, lines)) + '\n{"row": "repl'
    (directory.profile / "worker-0.jsonl").write_text(text)
    summary = merge(directory)
    assert summary["fractions"] == {"worker:0": {"wait": 0.5, "other": 0.5}}
    assert (summary["missing"], summary["damaged_lines"]) == (["ps:0", "worker:1"], 1)
    assert len(check_trace(json.loads(Path(summary["trace"]).read_text()))) == 4
    assert summary["trace"] == str(directory.profile / "trace.json")


def test_a_run_that_no_launcher_ended_is_merged_by_hand(tmp_path: Path, capsys, snapshot):
    directory = prepared(tmp_path / "run")
    directory.profile.mkdir()
    assert main([str(directory.path)]) == exit_codes.OK
    assert capsys.readouterr().out == snapshot


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_by_hand_it_takes_one_directory(arguments: list[str], capsys):
    assert main(arguments) == exit_codes.CONFIG
    assert "usage: python -m trainer.observe.profile RUN" in capsys.readouterr().err


def test_a_directory_without_a_profile_is_named(tmp_path: Path, capsys, snapshot):
    assert main([str(tmp_path)]) == exit_codes.INPUT_MISSING
    assert capsys.readouterr().err == snapshot


def test_merging_does_not_import_tensorflow():
    modules = "trainer.observe.profile.__main__, trainer.observe.profile.record"
    code = f"import sys, {modules}; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_value_that_is_no_bool_is_refused(tmp_path: Path):
    command = [sys.executable, "-m", "trainer", "profile=maybe"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = "profile=maybe: 'maybe' is not true or false\n    e.g. profile=false\n"
    assert (ended.returncode, ended.stderr) == (exit_codes.CONFIG, expected)


def test_the_help_mentions_it():
    assert "  profile=false" in help_page.template()


# In the graph


def test_a_clock_that_is_not_wanted_adds_nothing_to_a_graph():
    import tensorflow as tf

    from trainer.engine.instruments import GraphClock

    with tf.Graph().as_default() as graph:
        after = tf.constant(1.0)
        stamps = GraphClock(is_wanted=False)
        assert (stamps.end("wait", [after]), stamps.end("push", [after], on="ps:0"), stamps.arrive("worker:0", [])) == (
            [],
            [],
            [],
        )
        assert stamps.fetches == []
        assert [operation.type for operation in graph.get_operations()] == ["Const"]


def test_each_of_several_shards_of_a_task_is_stamped():
    import tensorflow as tf

    from trainer.engine.instruments import GraphClock

    with tf.Graph().as_default() as graph:
        stamps = GraphClock(is_wanted=True)
        (first,), (second,) = stamps.end("wait", [], on="ps:0"), stamps.end("wait", [], on="ps:0")
        assert stamps.fetches == [{"wait": {"ps:0": first, "ps:0/1": second}}, {}]
        assert [operation.type for operation in graph.get_operations()] == ["Timestamp", "Timestamp"]


# Real runs

SHORT = ["model=mlp", "train.batch_size=48", "train.steps=12", "checkpoint.every=5", "history.every=1"]
ROWS = {
    "cluster=local": {("worker:0", REPLICA): ["input", "compute", "apply"]},
    "cluster=1ps2w": {
        ("ps:0", SHARD): ["wait", "apply", "tokens"],
        ("worker:0", REPLICA): PHASES,
        ("worker:1", REPLICA): PHASES,
    },
    "cluster=2w": {(f"worker:{i}", row): ends for i in (0, 1) for row, ends in (
        (REPLICA, PHASES), (SHARD, ["wait", "apply", "tokens"])
    )},
}  # fmt: skip


def lines_of(run: Run, task: str) -> list[dict[str, Any]]:
    text = (run.directory / "profile" / f"{task.replace(':', '-')}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line]


def recorded(run: Run) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The lines of each row, as the tasks wrote them."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for name in run.tasks():
        for line in lines_of(run, name):
            if "row" in line:
                rows[name, line["row"]].append(line)
    return rows


def read_trace(run: Run) -> list[dict[str, Any]]:
    return check_trace(json.loads((run.directory / "profile" / "trace.json").read_text()))


@pytest.mark.long(but=["cluster=1ps2w"])
@pytest.mark.cluster
@pytest.mark.parametrize("cluster", ROWS)
def test_a_profile_changes_no_bit_and_has_every_step_of_every_row(finish, cluster: str):
    plain, run = finish(*SHORT, cluster, "run=plain"), finish(*SHORT, cluster, "profile=true", "run=profiled")
    assert run.summary()["params_sha256"] == plain.summary()["params_sha256"]
    assert ("profile" in plain.summary(), (plain.directory / "profile").exists()) == (False, False)
    rows = recorded(run)
    assert {row: list(lines[-1]["ends"]) for row, lines in rows.items()} == ROWS[cluster]
    assert {row: [line["step"] for line in lines] for row, lines in rows.items()} == {
        row: list(range(1, 13)) for row in rows
    }
    summary, events = run.summary()["profile"], read_trace(run)
    assert {event["args"]["step"] for event in events} == set(range(1, 13))
    assert (summary["missing"], summary["damaged_lines"]) == ([], 0)
    for told in (*summary["fractions"].values(), *summary["shard_fractions"].values()):
        assert sum(told.values()) == pytest.approx(1, abs=0.002)
    assert describe(summary) in run.output


@pytest.mark.long
@pytest.mark.cluster
def test_a_push_is_stamped_before_the_host_has_it_and_a_token_after_the_update(finish):
    run = finish(*SHORT, "cluster=2ps2w", "profile=true")
    rows = recorded(run)
    for worker in ("worker:0", "worker:1"):
        for line in rows[worker, REPLICA][1:]:  # the first joins, and waits for no token
            for host in ("ps:0", "ps:1"):
                update, before = rows[host, SHARD][line["step"] - 1], rows[host, SHARD][line["step"] - 2]
                assert line["ends"]["push"][host] <= update["arrived"][worker] <= update["ends"]["wait"]
                assert before["ends"]["wait"] <= before["ends"]["apply"] <= line["ends"]["wait"][host]
    came_last = run.summary()["profile"]["came_last"]
    assert sum(told["updates"] for told in came_last.values()) == 11


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("strategy", "most"),
    [(["strategy=async"], 1), (["strategy=backup", "strategy.quorum=2"], 2)],
    ids=["each", "quorum"],
)
def test_updates_tell_whose_gradients_are_in_them(finish, strategy: list[str], most: int):
    run = finish(*SHORT, *strategy, "cluster=1ps3w", "profile=true")
    updates = recorded(run)["ps:0", SHARD]
    assert [line["step"] for line in updates] == list(range(1, 13))
    assert {len(line["arrived"]) for line in updates} == {most}
    assert all(max(line["arrived"].values()) == line["ends"]["wait"] for line in updates)
    assert {event["name"] for event in read_trace(run)} >= {"wait", "apply", "compute", "push"}
    assert bool(run.summary()["profile"]["came_last"]) is (most > 1)


@pytest.mark.long
@pytest.mark.cluster
def test_all_reduce_has_the_phases_that_it_can_tell(finish):
    run = finish(*SHORT, "cluster=2w", "strategy=all_reduce", "profile=true")
    ends = {row: list(lines[0]["ends"]) for row, lines in recorded(run).items()}
    assert ends == {(f"worker:{i}", REPLICA): ["input", "compute", "sum"] for i in (0, 1)}
    read_trace(run)


@pytest.mark.cluster
def test_both_attempts_of_a_killed_worker_are_recorded(start):
    run = start(*SHORT, "cluster=1ps2w", "train.steps=60", "profile=true", "restart.delay_secs=0")
    run.wait_for_step(20)
    dead = run.last_pid("worker:1")
    os.kill(dead, signal.SIGKILL)
    assert run.wait() == 0, run.output
    pids = [line["pid"] for line in lines_of(run, "worker:1") if "pid" in line]
    assert (len(pids), pids[0]) == (2, dead)
    events = read_trace(run)
    made = json.loads((run.directory / "profile" / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"}
    steps = {name: {e["args"]["step"] for e in events if e["pid"] == pid} for pid, name in names.items()}
    assert list(names.values()) == ["ps:0", "worker:0", "worker:1", "worker:1, attempt 2"]
    assert min(steps["worker:1"]) == 1
    assert max(steps["worker:1, attempt 2"]) == 60
    assert steps["worker:0"] == set(range(1, 61))
    # A push may have counted, and its line not have come.
    assert len(steps["worker:0"] - steps["worker:1"] - steps["worker:1, attempt 2"]) <= 1


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_that_was_killed_leaves_a_profile_to_be_merged_by_hand(start, capsys):
    run = start(*SHORT, "cluster=1ps2w", "train.steps=2000", "profile=true")
    run.wait_for_step(10)
    run.end()
    assert main([str(run.directory)]) == exit_codes.OK
    assert "where the time" in capsys.readouterr().out
    assert len(read_trace(run)) > 10
