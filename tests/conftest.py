"""Which tests run, and the fixtures that many of them need."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from forks import Forks, forks
from runs import GPUS, LONGEST_SECS, Run

from trainer.launch.processes import warm

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_GRPC_WORKER_CACHE_QUEUES", "4")  # or each server of a test keeps 64 threads for ever
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as in tasks, whose bits are compared with those of the tests

pytest_plugins = ["snapshots"]
MOST_WORKERS = 8  # of pytest
NEEDS_DOCKER = "TRAINER_TESTS_NEED_DOCKER"  # set where tests of containers must run: CI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, metavar="K/N", help="of the long tests only the K-th of N parts")


def _part(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N, e.g. 3/8")
    return int(numbers[1]), int(numbers[2])


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        _shorten(item)
    if part := config.getoption("part"):
        k, n = part
        long = filter(lambda item: item.get_closest_marker("long"), items)
        left_out = {item for item in long if zlib.crc32(item.nodeid.encode()) % n != k - 1}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("cluster"):  # its runs have deadlines of their own
            item.add_marker(pytest.mark.timeout(3 * LONGEST_SECS))
    # One after the other they take long, because there is one engine of a kind on a machine: they begin first.
    items.sort(key=lambda item: item.path.parent.name != "engines")
    has_engine = bool(os.environ.get(NEEDS_DOCKER)) or _has_engine()
    for item in items:
        if GPUS == 0 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU (no /dev/nvidia0)"))
        if not has_engine and item.get_closest_marker("docker"):
            reason = (
                "NO CONTAINER WAS TESTED: no Docker engine with Compose answers (docker info, docker compose version)"
            )
            item.add_marker(pytest.mark.skip(reason=reason))


def _shorten(item: pytest.Item) -> None:
    """Takes the markers `long` and `slow` from the cases that their `but` names."""
    for mark in filter(None, map(item.get_closest_marker, ("long", "slow"))):
        if mark.kwargs and item.name.partition("[")[2][:-1] in mark.kwargs["but"]:
            item.own_markers.remove(mark)


@pytest.fixture(autouse=True)
def _end_clusters() -> Iterator[None]:
    yield
    if small_clusters := sys.modules.get("small_clusters"):  # it imports TensorFlow, which not every test needs
        small_clusters.end_trained()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _spare_collector(item.path)


@functools.lru_cache(maxsize=1)  # once a module
def _spare_collector(_: Path) -> None:
    """Exempts what there is, TensorFlow above all, from all later collections of garbage."""
    gc.collect()
    gc.freeze()


def _has_engine() -> bool:
    try:
        return all(
            subprocess.run(["docker", *words], capture_output=True, timeout=20, check=False).returncode == 0
            for words in (["info"], ["compose", "version"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_configure(config: pytest.Config) -> None:
    """Lets all commands of a session start their tasks from one process that has imported TensorFlow."""
    # As in the background of a shell, and after nohup; commands would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="trainer-")
        config.add_cleanup(functools.partial(_end_warm_processes, folder))
        os.environ |= {"XDG_RUNTIME_DIR": folder, "TRAINER_WARM_MINUTES": "5"}


def _end_warm_processes(folder: str) -> None:
    for one in warm.find():
        warm.end(one)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def python() -> Iterator[Forks]:
    """Runs command lines of Python that need no TensorFlow, in forks of one interpreter."""
    with forks("trainer.commands.command", "trainer.plan.validate", "trainer.launch.describe", "numpy") as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def tensorflow_python() -> Iterator[Forks]:
    """Runs command lines of Python that need TensorFlow, in forks of an interpreter that has imported it."""
    with forks("tensorflow", "trainer.task.server", "trainer.engine.instruments") as interpreter:
        yield interpreter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """start(*overrides, environment={...}, within=[...]) -> Run; killed at the end of the test."""
    runs: list[Run] = []

    def start_one(*overrides: str, environment: dict[str, str] | None = None, within: Sequence[str] = ()) -> Run:
        runs.append(Run(list(overrides), tmp_path, environment or {}, within))
        return runs[-1]

    yield start_one
    for run in runs:
        run.end()


@pytest.fixture
def finish(start: Callable[..., Run]) -> Callable[..., Run]:
    """finish(*overrides, environment={...}) -> the Run, ended with 0."""

    def finish_one(*overrides: str, environment: dict[str, str] | None = None) -> Run:
        run = start(*overrides, environment=environment)
        assert run.wait() == 0, run.output + "\n".join(log.read_text() for log in run.logs())
        return run

    return finish_one


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than the cores, because tests also wait for clusters; each and its clusters may take some GiB."""
    return min((os.cpu_count() or 1) + 1, MOST_WORKERS)
