"""Limits of nested control groups, of both versions, read from files of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.observe.machine import CgroupLimits, cgroup_limits, memory_info, usable_cores

GIB = 2**30
V1_UNLIMITED = "9223372036854771712\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def nested_v2(tmp_path):
    """A job in a slice: the slice limits cores and threads, the job itself memory."""
    slice_, job = "sys/fs/cgroup/batch.slice", "sys/fs/cgroup/batch.slice/job-7"
    files = {
        "proc/self/cgroup": "0::/batch.slice/job-7\n",
        f"{slice_}/cpu.max": "250000 100000\n",
        f"{slice_}/pids.max": "500\n",
        f"{slice_}/memory.max": f"{8 * GIB}\n",
        f"{slice_}/memory.current": f"{5 * GIB}\n",
        f"{job}/cpu.max": "max 100000\n",
        f"{job}/pids.max": "max\n",
        f"{job}/memory.max": f"{2 * GIB}\n",
        f"{job}/memory.current": f"{GIB}\n",
        f"{job}/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
    }
    return write(tmp_path, files)


def test_the_tightest_limit_of_all_groups_around_a_process_counts(nested_v2):
    assert cgroup_limits(nested_v2) == CgroupLimits(
        cores=2.5, memory_bytes=2 * GIB, memory_used_bytes=3 * GIB // 4, threads=500
    )


def test_an_inner_group_may_be_tighter_than_the_one_around_it(nested_v2):
    (nested_v2 / "sys/fs/cgroup/batch.slice/job-7/cpu.max").write_text("150000 100000\n")
    assert cgroup_limits(nested_v2).cores == 1.5


def test_a_container_that_sees_its_own_group_as_the_root_has_limits_there(tmp_path):
    files = {"proc/self/cgroup": "0::/../pod\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}
    assert cgroup_limits(write(tmp_path, files)).cores == 4


def test_limits_of_cgroup_v1_stand_below_each_controller(tmp_path):
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n8:pids:/pod\n4:memory:/pod/a\n2:cpu,cpuacct:/pod/a\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/pod/a/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/pod/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
        "sys/fs/cgroup/memory/pod/a/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/pod/a/memory.usage_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/pod/a/memory.stat": "inactive_file 10\ntotal_inactive_file 400\n",
        "sys/fs/cgroup/pids/pod/pids.max": "64\n",
    }
    assert cgroup_limits(write(tmp_path, files)) == CgroupLimits(
        cores=3, memory_bytes=GIB, memory_used_bytes=600, threads=64
    )


def test_beside_cgroup_v1_the_limits_of_v2_stand_below_unified(tmp_path):
    files = {"proc/self/cgroup": "1:cpu:/\n0::/a\n", "sys/fs/cgroup/unified/a/pids.max": "99\n"}
    assert cgroup_limits(write(tmp_path, files)).threads == 99


def test_a_system_without_control_groups_has_no_limits(tmp_path):
    assert cgroup_limits(tmp_path) == CgroupLimits()


@pytest.mark.parametrize(("limit", "cores"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_a_plan_counts_whole_cores(limit, cores):
    assert usable_cores(limit, allowed=8) == cores


def test_memory_is_in_bytes(tmp_path):
    text = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
    assert memory_info(write(tmp_path, {"proc/meminfo": text})) == {"MemTotal": 16 * GIB, "MemAvailable": 8 * GIB}
    assert memory_info(tmp_path / "elsewhere") == {}
