"""Real runs under faults: they end with the bits of an unbroken run, and a run that does not is reported."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable

import pytest
from runs import Run

pytestmark = pytest.mark.cluster

SHORT = ["mode=chaos", "model=mlp", "train.batch_size=48", "checkpoint.every=10", "history.every=1", "run=runs"]

Start = Callable[..., Run]


def scheduled(faults: str) -> str:
    return f'chaos.schedule="{faults}"'


def results(run: Run) -> dict:
    return json.loads((run.directory / "chaos.json").read_text())


def assert_identical(run: Run, faults: int) -> None:
    """All faults came, and the run is as an unbroken one."""
    assert run.wait() == 0, run.output
    (kind,) = results(run)["kinds"]
    assert (kind["runs"], kind["finished"], kind["identical"]) == (1, 1, 1)
    (broken,) = results(run)["runs"]
    assert len(broken["measured"]) == faults
    digests = {
        json.loads((run.directory / name / "summary.json").read_text())["params_sha256"]
        for name in ("unbroken", "schedule")
    }
    assert len(digests) == 1
    assert "| schedule | 1 | 1 | 1 |" in (run.directory / "chaos.md").read_text()


@pytest.mark.long
def test_a_cluster_that_loses_its_chief_and_a_ps_ends_with_the_same_bits(start: Start):
    run = start("cluster=2ps2w", "train.steps=150", scheduled("kill chief in push @15; kill ps:0 @40"), *SHORT)
    assert_identical(run, faults=2)


@pytest.mark.long
def test_over_a_bfloat16_wire_a_worker_killed_between_its_pushes_changes_no_bit(start: Start):
    faults = "kill worker:1 in push @15; kill worker:0 @40"
    run = start("cluster=2w", "strategy.wire=bfloat16", "train.steps=100", scheduled(faults), *SHORT)
    assert_identical(run, faults=2)


@pytest.mark.long
def test_with_buckets_tasks_that_are_killed_change_no_bit(start: Start):
    faults = "kill worker:1 in push @15; kill worker:0 @40; kill ps:0 @70"
    options = ["placement.buckets=3", "placement.max_part_mib=0.1", "train.steps=120", scheduled(faults), *SHORT]
    assert_identical(start("cluster=1ps2w", *options), faults=3)


@pytest.mark.long
def test_a_link_that_is_slow_and_then_cut_changes_no_bit(start: Start):
    faults = "delay worker:1->ps:0 20+-10ms @10 for 2s; cut worker:1->ps:0 @40 for 3s"
    run = start("cluster=1ps2w", "train.steps=300", scheduled(faults), *SHORT)
    assert_identical(run, faults=2)
    cut = results(run)["runs"][0]["measured"][1]
    assert 3 <= cut["recover_secs"] < 15


LOSES_ONE_PERCENT = """
ip link set lo up
iptables -A INPUT -i lo -m statistic --mode random --probability 0.01 -j DROP || exit 3
"$@"
code=$?
echo packets lost: $(iptables -nvxL INPUT | awk '/statistic/ { print $1 }')
exit $code
"""
LOSSY = ["unshare", "--net", "sh", "-c", LOSES_ONE_PERCENT, "sh"]


@pytest.mark.long
def test_a_slow_network_that_loses_packets_changes_no_bit(start: Start):
    try:
        subprocess.run([*LOSSY, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network can be made here, which takes root, unshare and iptables: {error}")
    links = [f"worker:{worker}->ps:{ps}" for worker in (0, 1) for ps in (0, 1)]
    faults = "; ".join(f"delay {link} 50+-25ms @2 for 20s" for link in links)
    lossy = ["security.isolate=never", scheduled(faults), *SHORT]  # a network of its own would lose nothing
    run = start("cluster=2ps2w", "train.steps=40", *lossy, within=LOSSY)
    assert_identical(run, faults=4)
    (lost,) = re.findall(r"packets lost: (\d+)", run.output)
    assert int(lost) > 0


@pytest.mark.long
def test_a_run_that_is_stopped_is_continued(start: Start):
    run = start("cluster=1ps2w", "train.steps=120", scheduled("term worker:1 @20"), *SHORT)
    assert_identical(run, faults=1)
    log = (run.directory / "schedule/launcher.log").read_text()
    assert re.search(r"Stopped at step \d+, checkpoint saved", log)
    assert "resumes at step" in log


@pytest.mark.long
def test_a_run_that_does_not_survive_is_reported_with_its_folder_and_how_to_repeat_it(start: Start):
    # One process takes 2 ms a step of the small model: it would be at its end before the launcher had looked.
    slower = ["model=cnn" if override == "model=mlp" else override for override in SHORT]
    run = start("train.steps=150", "restart.max=0", "chaos.random=1", "chaos.kinds=[kill-chief,kill-ps]", *slower)
    assert run.wait() == 1, run.output
    assert "kill-ps is left" in run.output
    assert f"{run.directory}/kill-chief-01: it ended with" in run.output
    assert "to repeat it: 'chaos.schedule=\"kill chief @" in run.output
    assert results(run)["kinds"][0]["finished"] == 0


@pytest.mark.long
def test_a_soak_ends_in_time_with_every_example_counted(start: Start):
    run = start(
        "mode=chaos", "cluster=2ps2w", "model=oracle", "data=oracle", "optimizer=sgd", "optimizer.learning_rate=48",
        "train.batch_size=48", "chaos.minutes=0.4", "chaos.every_secs=8", "chaos.kinds=[kill-ps,kill-worker]",
        "run=runs",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    (soak,) = results(run)["runs"]
    assert len(soak["measured"]) >= 1
    assert soak["problems"] == []


def test_a_bad_schedule_starts_nothing(start: Start):
    run = start("cluster=1ps2w", scheduled("kill ps:3 @40; kill worker:1 @999999"), *SHORT)
    assert run.wait() == 2
    assert "chaos.schedule: 'kill ps:3 @40': " in run.output
    assert "'kill worker:1 @999999' is after" in run.output
    assert not run.directory.exists()
