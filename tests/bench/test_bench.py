"""The bench: its statistics, measurements, table and contestants, and that none outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from quick_config import load as load_config
from runs import LONGEST_SECS, STALLED_SECS, wait_until

from bench import counter, facts, plot, processes, report, running
from bench.config import QUICK, parse
from bench.contestants import CONTESTANTS, QUICK_ROWS, ROOT, ROWS, WORKLOADS, Contestant, select
from bench.ratios import Ratio, paired, ratio
from bench.running import ContestantError, Running
from bench.windows import alternate
from trainer.config.schema import StrategyConfig
from trainer.faults.problems import ConfigError

pytestmark = pytest.mark.slow

PEERS = {contestant.peer: name for name, contestant in CONTESTANTS.items() if not contestant.is_ours}  # by program
OURS = [name for name, contestant in CONTESTANTS.items() if contestant.is_ours]
COUNTS = """
import sys, time
from bench.counter import Counter
counter, steps = Counter(sys.argv[1]), 0
while True:
    steps += 1
    counter.set(steps)
    time.sleep(0.001)
"""


class Script(Contestant):
    """A peer that is a few lines of Python."""

    def command(self, workload: str, directory: Path, cores: int) -> list[str]:
        return ["-c", self.options[0], str(directory)]


def script(text: str, directory: Path) -> Running:
    directory.mkdir(exist_ok=True)
    return Running(Script("script", "a script", 10, peer="none", options=(text,)), "noop", directory, cores=1)


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Running]:
    with script(COUNTS, tmp_path / "counting") as started:
        started.wait_for_first_step(STALLED_SECS)
        yield started


# Statistics


def test_windows_are_paired_with_their_neighbours():
    assert paired([10, 20, 30], [5, 20, 60]) == [2, 1, 0.5]


def test_a_ratio_is_the_median_of_the_pairs():
    assert ratio([1.0, 2.0, 9.0]).median == 2.0


def test_equal_pairs_have_an_interval_of_one_value():
    assert ratio([1.5] * 8) == Ratio(1.5, 1.5, 1.5)


def test_the_interval_of_two_values_in_equal_numbers_is_both():
    assert ratio([1.0, 2.0] * 4) == Ratio(1.5, 1.0, 2.0)


def test_one_disturbed_window_in_eight_is_not_in_the_interval():
    assert ratio([1.0] * 7 + [5.0]).high == 1.0


def test_the_interval_is_the_same_each_time():
    assert ratio([1.0, 1.1, 1.3, 0.9]) == ratio([1.0, 1.1, 1.3, 0.9])


def test_no_pairs_have_no_ratio(raises):
    with raises(ValueError):
        ratio([])


# Processes and traffic


def test_peak_memory_is_read_in_mib():
    assert processes.parse_status_mib("Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t  2048 kB\n") == 2.0


def test_a_process_that_is_ending_has_no_memory():
    assert processes.parse_status_mib("Name:\tx\nState:\tZ (zombie)\n") == 0.0


def test_the_traffic_of_the_loopback_interface_is_counted():
    nbytes, packets = processes.loopback(os.getpid())
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        one.sendto(bytes(10_000), other.getsockname())
        other.recv(10_000)
    after = processes.loopback(os.getpid())
    assert after[0] - nbytes >= 10_000
    assert after[1] > packets


def test_the_processor_is_named():
    assert facts.cpu_model("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: A CPU\n") == "A CPU @ 2 GHz"


def test_the_first_step_is_timed_once(tmp_path: Path):
    steps = counter.Counter(tmp_path)
    steps.set(0)
    assert counter.read(tmp_path) == (0, None)
    steps.set(1)
    _, first_at = counter.read(tmp_path)
    steps.set(2)
    assert counter.read(tmp_path) == (2, first_at)


def test_a_peer_that_has_not_begun_to_count_is_at_no_step(tmp_path: Path):
    assert counter.read(tmp_path) == (0, None)


# Rows


def test_every_contestant_is_compared():
    assert {name for row in ROWS for name in (row.ours, row.other)} == set(CONTESTANTS)


def test_no_row_is_listed_twice():
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_each_row_is_measured_with_some_workload_and_tables_only_where_there_are_targets():
    assert all(any(row.is_of(workload) for workload in WORKLOADS) for row in ROWS)
    assert [row.name for row in ROWS if row.is_of("clicks")] == [
        "sync/sync_replicas_tuned",
        "sync/sync_replicas",
        "sync_f32/sync_replicas_tuned",
        "sync/local",
        "async/parameter_server_tuned",
        "async/parameter_server_tables",
        "sync/keras_fit",
    ]
    assert len([row for row in ROWS if not row.is_of("cnn")]) == 3


def test_the_rows_of_quick_exist():
    assert len(select(ROWS, list(QUICK_ROWS))) == len(QUICK_ROWS)


@pytest.mark.parametrize("name", OURS)
def test_our_contestants_are_valid_configs(name, tmp_path: Path):
    if "bf16" in name and not hasattr(StrategyConfig(), "wire"):
        pytest.skip("strategy.wire is not a key of this version")
    from trainer.commands.validation import complete

    overrides = CONTESTANTS[name].command("cnn", tmp_path, cores=2)[2:]
    assert load_config(overrides, complete).train.batch_size == 128


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_can_be_chosen(workload, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = CONTESTANTS["sync"].command(workload, tmp_path, cores=2)[2:]
    assert load_config(overrides).model.name == {"clicks": "ctr"}.get(workload, workload)


@pytest.mark.parametrize(
    ("workload", "tensors", "nbytes"), [("noop", 1, 40), ("mlp40", 82, 2_646_056), ("resnet50", 161, 102_228_128)]
)
def test_workloads_have_the_parameters_they_promise(workload, tensors, nbytes):
    from bench import workloads

    model = getattr(workloads, workload)((28, 28, 1), 10)
    assert (len(model.trainable_variables), 4 * model.count_params()) == (tensors, nbytes)


def test_all_forms_of_clicks_are_the_same_model(monkeypatch: pytest.MonkeyPatch):
    import numpy as np
    import tensorflow as tf

    from bench.peers import clicks

    monkeypatch.setattr(clicks, "CLICKS_ROWS", 100)
    drawn, losses = np.random.default_rng(0), []
    table = drawn.random((clicks.FIELDS * 100, clicks.CLICKS_WIDTH), np.float32)
    dense = [tf.constant(drawn.standard_normal(shape, np.float32) / 16) for shape in clicks.dense_shapes()]
    packed = next(iter(clicks.batches(batch=64, tuned=True)))
    ids = tf.reshape(tf.gather(packed.ids, packed.which), [64, clicks.FIELDS]) - np.arange(clicks.FIELDS) * 100
    for tuned, batch in ((True, packed), (False, packed._replace(ids=ids))):
        tables = np.split(table, len(clicks.tables(tuned=tuned)))
        given = clicks.ids_of(batch, tuned=tuned)
        rows = [tf.nn.embedding_lookup(one, own) for one, own in zip(tables, given, strict=True)]
        losses.append(float(clicks.loss_of(dense, rows, batch, tuned=tuned)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    drawn_batch = next(iter(clicks.batches(batch=64, tuned=False)))
    assert int(tf.reduce_max(drawn_batch.ids)) < 100
    assert drawn_batch.ids.shape == (64, clicks.FIELDS)
    model = clicks.keras_model()
    assert model.count_params() == table.size + sum(np.prod(shape) for shape in clicks.dense_shapes())
    assert model(next(iter(clicks.keras_batches(batch=64)))[0]).shape == (64, 1)


# Options


def problems(*arguments: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(arguments)
    return str(raised.value)


def test_an_unknown_workload_is_refused_with_the_known_ones():
    assert "unknown workload 'cnm'; available: noop, cnn, mlp40" in problems("workloads=[cnm]")


def test_an_unknown_row_is_refused_with_the_nearest():
    assert "e.g. rows=[sync/local]" in problems("rows=[sync/locl]")


@pytest.mark.parametrize("argument", ["rounds=two", "rounds=0", "round=1", "zzz=1", "quick"])
def test_an_invalid_option_is_refused(argument, snapshot):
    assert problems(argument) == snapshot


def test_patterns_choose_rows():
    assert parse(["rows=[*/local]"]).rows == ["*/local"]
    assert [row.name for row in select(ROWS, ["a*/local"])] == ["all_reduce/local", "async/local"]


def test_quick_keeps_typed_options():
    options = parse(["quick=true", "workloads=[mlp40]"])
    assert (options.workloads, options.rows, options.rounds) == (["mlp40"], list(QUICK_ROWS), QUICK.rounds)


def test_all_workloads_are_measured_unless_some_are_named():
    assert parse([]).workloads == list(WORKLOADS)


def test_the_bench_does_not_import_tensorflow():
    code = "import sys, bench.__main__; assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Results

RESULTS = {
    "machine": {"cores": 2, "cpu": "A CPU", "date": "2026-01-01 00:00 UTC", "commit": None},
    "options": {"window_secs": 3.0, "rounds": 4},
    "rows": [
        {
            "workload": "cnn",
            "title": "sync / local",
            "target": 0.7,
            "group": "share",
            "judged": "best",
            "median": 0.65,
            "low": 0.6,
            "high": 0.7,
        },
        {
            "workload": "cnn",
            "title": "sync_2w / local",
            "target": 0.7,
            "group": "share",
            "judged": "best",
            "median": 0.75,
            "low": 0.71,
            "high": 0.8,
        },
        {
            "workload": "cnn",
            "title": "sync / peer",
            "target": 1.4,
            "group": "sync/peer",
            "judged": "each",
            "median": 1.5,
            "low": 1.3,
            "high": 1.6,
        },
        {
            "workload": "cnn",
            "title": "a / b",
            "target": None,
            "group": "a/b",
            "judged": "each",
            "failed": "b ended with exit code 3",
            "log": ["no luck"],
        },
    ],
    "contestants": [
        {
            "workload": "cnn",
            "title": "sync",
            "examples_per_sec": 1234.5,
            "cpu_ms_per_step": {"ps:0": 1.5, "worker:0": 20.25},
            "wire_nbytes_per_step": 22 * 2**20,
            "wire_packets_per_step": 400.4,
            "first_step_secs": [3.0, 4.0],
            "peak_mib": {"ps:0": 500, "worker:0": 700},
        }
    ],
    "starts": [
        {
            "cluster": "2ps4w",
            "first_step_secs": [4.0, 6.0, 5.5],
            "target_secs": 5.0,
            "verdict": "missed",
            "dies": "worker:1",
            "successor_secs": [2.0],
            "peak_mib": {"ps:0": 500},
            "failed": [],
        }
    ],
}


def test_the_best_of_rows_that_share_a_target_is_judged():
    assert [row.get("verdict") for row in report.judged(RESULTS["rows"])] == [None, "met", "missed", None]


def test_the_worst_of_rows_that_share_a_target_is_judged():
    rows = [row | {"judged": "worst"} for row in RESULTS["rows"][:2]]
    assert [row.get("verdict") for row in report.judged(rows)] == ["missed", None]


def test_the_table_shows_ratios_targets_and_failures():
    page = report.markdown(RESULTS | {"rows": report.judged(RESULTS["rows"])})
    for line in (
        "cores 2, cpu A CPU, date 2026-01-01 00:00 UTC.",
        "| cnn | sync / local | 0.65 | 0.60 to 0.70 | 0.7 |  |",
        "| cnn | sync_2w / local | 0.75 | 0.71 to 0.80 | 0.7 | met |",
        "| cnn | sync / peer | 1.50 | 1.30 to 1.60 | 1.4 | missed |",
        "| cnn | a / b | - | - | - | b ended with exit code 3 |",
        "| cnn | sync | 1,234 | 21.8 | ps:0 1.5, worker:0 20.2 | 22.00 | 400 | 3.5 (3.0 to 4.0) | 1,200 | 700 |",
        "| 2ps4w | 5.5 (4.0 to 6.0) | 5 | missed | worker:1 | 2.0 | ps:0 500 |",
        "no luck",
    ):
        assert line in page.splitlines()


def test_without_the_plot_library_the_other_results_are_written_and_it_is_named(monkeypatch, tmp_path: Path, snapshot):
    monkeypatch.setattr(plot, "version_of", lambda name: None)
    assert str(plot.write(RESULTS, tmp_path / "results.svg")) == snapshot
    assert not (tmp_path / "results.svg").exists()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_ratios_are_drawn(suffix, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"results.{suffix}"
    assert plot.write(RESULTS | {"rows": report.judged(RESULTS["rows"])}, path) is None
    assert path.stat().st_size > 5000


# Contestants at work


def test_a_contestant_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path, raises):
    with (
        script("print('no luck', flush=True); raise SystemExit(3)", tmp_path / "dies") as dies,
        raises(ContestantError) as caught,
    ):
        dies.wait_for_first_step(STALLED_SECS)
    assert caught.value.log == ["no luck"]


def test_a_contestant_that_makes_no_step_has_a_deadline(tmp_path: Path, raises):
    with script("import time; time.sleep(600)", tmp_path / "sleeps") as sleeps, raises(ContestantError):
        sleeps.wait_for_first_step(0.5)


def test_a_contestant_that_stops_stepping_fails_its_window(counting: Running, monkeypatch, raises):
    monkeypatch.setattr(running, "SILENT_SECS", 0.5)
    counting.pause()
    with raises(ContestantError):
        counting.next_step()


def test_a_paused_contestant_is_frozen_with_all_its_processes(tmp_path: Path):
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COUNTS!r}, sys.argv[1]])"
    with script(text, tmp_path / "parent") as parent:
        parent.wait_for_first_step(STALLED_SECS)
        parent.pause()
        pids = processes.tree(parent.pid)
        # A process on another core stops a moment after its signal.
        wait_until(lambda: [psutil.Process(pid).status() for pid in pids] == [psutil.STATUS_STOPPED] * 2)
        parent.resume()
        parent.next_step()
    assert processes.wait_until_gone(pids) == []


def test_windows_alternate_and_measure_both(counting: Running, tmp_path: Path):
    with script(COUNTS, tmp_path / "other") as other:
        other.wait_for_first_step(STALLED_SECS)
        for one in (counting, other):
            one.pause()
        ours, others = alternate(counting, other, rounds=1, secs=0.2)
    assert len(ours) == len(others) == 2
    assert all(window.examples_per_sec > 0 and "process" in window.cpu_ms for window in (*ours, *others))


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("name", PEERS.values())
def test_every_peer_starts_and_counts_its_steps(name, tmp_path: Path):
    with Running(CONTESTANTS[name], "noop", tmp_path, cores=2) as peer:
        peer.wait_for_first_step(LONGEST_SECS)
        first, _ = peer.next_step()
        peer.pause()
        peer.resume()
        assert peer.next_step()[0] > first
        pids = processes.tree(peer.pid)
    assert processes.wait_until_gone(pids) == []


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("name", ["all_reduce", "multi_worker"])
def test_a_pause_longer_than_the_usual_heartbeat_is_not_a_fault(name, tmp_path: Path):
    with Running(CONTESTANTS[name], "noop", tmp_path, cores=2) as paused:
        paused.wait_for_first_step(LONGEST_SECS)
        paused.pause()
        time.sleep(15)  # the coordination service of TensorFlow takes a task that is silent for 10 s for dead
        paused.resume()
        step, _ = paused.next_step()
        time.sleep(2)  # in which it would notice
        assert paused.next_step()[0] > step


# The command


def command(results: Path, *overrides: str) -> list[str]:
    short = ["workloads=[noop]", "rounds=1", "window_secs=0.5", "warm_up_secs=0.2", "starts=0"]
    return [sys.executable, "-m", "bench", f"results={results}", *short, *overrides]


@pytest.mark.long
@pytest.mark.cluster
def test_a_bench_leaves_its_results_and_no_process(tmp_path: Path):
    bench = subprocess.Popen(command(tmp_path, "rows=[sync/sync]"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = bench.communicate(timeout=LONGEST_SECS)
    finally:
        bench.kill()
    assert bench.returncode == 0, output
    results = json.loads((tmp_path / "results.json").read_text())
    (row,) = results["rows"]
    assert row["low"] <= row["median"] <= row["high"]
    assert len(row["pairs"]) == 2
    (contestant,) = results["contestants"]
    assert set(contestant["cpu_ms_per_step"]) == {"launcher", "nursery", "ps:0", "worker:0", "worker:1"}
    assert len(contestant["first_step_secs"]) == 2  # of both instances
    assert contestant["wire_nbytes_per_step"] > 0
    assert "| noop | sync, 1 ps / sync, 1 ps |" in (tmp_path / "results.md").read_text()


@pytest.mark.long(but=["2-130"])
@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_bench_that_is_stopped_leaves_no_process(number, code, tmp_path: Path):
    bench = subprocess.Popen(command(tmp_path, "rows=[sync/sync_replicas]"), cwd=ROOT, stdout=subprocess.PIPE)
    try:
        # The bench, a launcher, its nursery, 1 ps, 2 workers.
        wait_until(lambda: bench.poll() is not None or len(processes.tree(bench.pid)) == 6, poll_secs=0.05)
        pids = processes.tree(bench.pid)
        bench.send_signal(number)
        assert bench.wait(LONGEST_SECS) == code
        assert processes.wait_until_gone(pids) == []
    finally:
        bench.kill()
