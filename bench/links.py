"""Measures steps over links of 1 Gbit/s and 100 Mbit/s, with every task in its own network namespace.

    python -m bench.links [--quick]        as root

writes bench/results/links.md and links.json. The namespaces hang on a bridge within a namespace of this process; each
cable carries so much either way. All of it belongs to processes that end with this one, so nothing is left, whatever
ends it. Beside each step stands what its bytes take at least.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench import processes
from bench.facts import RESULTS, of_machine
from bench.steady import ALONE, START_SECS, RunError
from trainer.config.compose import load
from trainer.faults.problems import ConfigError
from trainer.launch.describe import describe
from trainer.launch.processes import isolation
from trainer.observe.machine import this_machine
from trainer.observe.peers import read_status
from trainer.plan import traffic
from trainer.plan.addresses import CONTROL_PORT_OFFSET
from trainer.plan.description import ModelProbe
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan

PORT, SUBNET, BRIDGE = 2222, "10.213.79", "bridge0"
RATES = {"1gbit": 1.0, "100mbit": 0.1}  # as tc writes them: gigabits per second
CLUSTERS = ["1ps2w", "2ps2w"]
VARIANTS: dict[str, list[str]] = {
    "float32": [],
    "float32, 4 buckets": ["placement.buckets=4"],
    "bfloat16": ["strategy.wire=bfloat16"],
    "bfloat16, 4 buckets": ["strategy.wire=bfloat16", "placement.buckets=4"],
}
EXAMPLES = 32  # of a replica
WORKLOAD = ["model=cnn", "data=mnist_10k", "placement.max_part_mib=2"]  # or one bucket would hold nearly all
WARM_STEPS, STEPS, WINDOW_SECS = 3, 12, 30.0


class LinkRow(NamedTuple):
    link: str
    cluster: str
    variant: str
    step_ms: float
    least_ms: float  # that the bytes of a step take, if both directions of the fullest link are in use at once


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="one cluster over the faster link, only printed")
    quick = arguments.parse_args().quick
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        needs = f"{' and '.join(missing)} (packages iproute2, util-linux)" if missing else "root"
        print(f"bench-links makes network namespaces, which needs {needs}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = of_machine()
    try:
        isolation.enter()
        make_bridge()
        rows, left_out = measure_all(["1gbit"] if quick else list(RATES), ["1ps2w"] if quick else CLUSTERS)
    except (LinkError, OSError) as error:
        print(f"bench-links: {error}", file=sys.stderr)
        return 2
    results = {"machine": facts, "rows": [row._asdict() for row in rows], "left_out": left_out}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "links.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "links.md").write_text(page(results))
    print(page(results))
    return 0


class LinkError(Exception):
    """The network cannot be made; says which command failed, and how."""


def measure_all(links: Sequence[str], clusters: Sequence[str]) -> tuple[list[LinkRow], list[str]]:
    """Returns every variant on every cluster over every link; and why some are missing."""
    rows, left_out = [], []
    variants = {}
    for variant, overrides in VARIANTS.items():
        lacking = unknown_key(overrides)
        if lacking is None:
            variants[variant] = overrides
        else:
            left_out.append(f"{variant} is left out: {lacking}")
    for link in links:
        for cluster in clusters:
            for variant, overrides in variants.items():
                try:
                    rows.append(measure(link, cluster, variant, overrides))
                except RunError as error:
                    left_out.append(f"{variant} on {cluster} over {link} is left out: {error}")
                    print(left_out[-1], file=sys.stderr)
                else:
                    print(line(rows[-1]._asdict()), file=sys.stderr)
    return rows, left_out


def unknown_key(overrides: Sequence[str]) -> str | None:
    """Returns why this trainer does not take the overrides; none if it does."""
    try:
        load(list(overrides))
    except ConfigError as error:
        return error.problems[0].message
    return None


def measure(link: str, cluster: str, variant: str, overrides: Sequence[str]) -> LinkRow:
    """Returns the time of a step over links of that rate.

    Raises:
        RunError: if a task ends, or does not come to train.
        LinkError: if the network cannot be made.
    """
    options = [*WORKLOAD, f"cluster={cluster}", *overrides]
    plan = planned(options)
    names = [task.name for task in plan.tasks]
    addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(names, start=1)}
    listed = ",".join(
        f"{job}:[{','.join(f'{addresses[name]}:{PORT}' for name in names if name.startswith(job))}]"
        for job in ("ps", "worker")
    )
    options += [f"cluster.addresses={{{listed}}}", f"train.batch_size={plan.global_batch}", *ALONE]
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="trainer-bench-"))
        tasks = []
        for name in names:
            namespace = stack.enter_context(cabled(addresses[name], link))
            job, _, index = name.partition(":")
            command = ["-m", "trainer", *options, f"job={job}", f"task={index}", f"run={directory}/run"]
            log = stack.enter_context(Path(directory, f"{job}-{index}.log").open("wb"))
            tasks.append(stack.enter_context(running(["nsenter", f"--net={namespace}", sys.executable, *command], log)))
        secs = step_secs(tasks, f"{addresses['worker:0']}:{PORT + CONTROL_PORT_OFFSET}", Path(directory))
    return LinkRow(link, cluster, variant, 1000 * secs, least_ms(plan, link))


def planned(overrides: Sequence[str]) -> Plan:
    """Returns the plan of a run with EXAMPLES for each replica, of tasks that each have a machine."""
    config = load([*overrides, "train.batch_size=16"]).config
    config = replace(config, train=replace(config.train, batch_size=EXAMPLES * config.cluster.worker))
    description = describe(ModelProbe.about(config.model, config.data, user=None, seed=config.seed))
    plan = make_plan(config, description, this_machine())
    return replace(plan, wire="float32") if plan.wire_format.is_shared else plan


def least_ms(plan: Plan, link: str) -> float:
    return 1000 * 8 * traffic.narrowest(plan)[1] / (RATES[link] * 1e9)


def step_secs(tasks: Sequence[subprocess.Popen[bytes]], chief: str, logs: Path) -> float:
    """Returns the mean seconds of the chief's steps, from the start of one to the start of another."""
    deadline = time.monotonic() + START_SECS

    def step() -> int:
        ended = [task for task in tasks if task.poll() is not None]
        if ended or time.monotonic() > deadline:
            ends = [
                f"{log.stem}: {log.read_text(errors='replace').strip()[-300:]}" for log in sorted(logs.glob("*.log"))
            ]
            raise RunError("; ".join(ends))
        try:
            return read_status(chief, timeout_secs=10.0).step
        except (OSError, ValueError):  # not there yet
            return 0

    def wait_for_more_than(before: int) -> tuple[int, float]:
        while (now := step()) <= before:
            time.sleep(0.005)
        return now, time.monotonic()

    first, began = wait_for_more_than(WARM_STEPS)
    last, ended = wait_for_more_than(first)
    while last - first < STEPS and ended - began < WINDOW_SECS:
        last, ended = wait_for_more_than(last)
    return (ended - began) / (last - first)


def make_bridge() -> None:
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


@contextmanager
def cabled(address: str, link: str) -> Iterator[str]:
    """Makes a network with this address, behind a link of this rate to the bridge; returns its path."""
    number = address.rpartition(".")[2]
    with running(["unshare", "--net", "sleep", "infinity"], subprocess.DEVNULL) as holder:
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == mine:  # it has not come so far
            time.sleep(0.01)
        inside = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        cable, pid = f"cable{number}", str(holder.pid)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", pid)
        try:
            run("ip", "link", "set", cable, "master", BRIDGE, "up")
            run(*inside, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run(*inside, "ip", "link", "set", device, "up")
            # A bucket of 10 ms, and as much again on the way: what does not fit waits in the sender.
            shape = ["root", "tbf", "rate", link, "burst", "1mb", "latency", "20ms"]
            run(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
            run("tc", "qdisc", "add", "dev", cable, *shape)
            yield f"/proc/{holder.pid}/ns/net"
        finally:
            subprocess.run(["ip", "link", "delete", cable], capture_output=True, check=False)


@contextmanager
def running(command: Sequence[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process that ends with this block, and with this process."""
    process = processes.start(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(*command: str) -> None:
    """Runs a command of the network's.

    Raises:
        LinkError: if it fails.
    """
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise LinkError(f"{' '.join(command)}: {ended.stderr.strip() or ended.returncode}")


def page(results: dict[str, Any]) -> str:
    """Returns the table, as Markdown."""
    facts = results["machine"]
    lines = [
        "# What links make of a step",
        "",
        f"{facts['cpu']}, {facts['cores']} cores shared by all tasks, TensorFlow {facts['tensorflow']}, "
        f"{facts['date']}. The CNN with {EXAMPLES} examples a replica; every task in a network of its own, whose cable "
        "carries so much each way. At least: what the bytes of the fullest link take, if parameters and gradients "
        "travel at the same time.",
        "",
        "| link | cluster | wire | ms per step | at least |",
        "|---|---|---|---|---|",
        *map(line, results["rows"]),
        *(["", *results["left_out"]] if results["left_out"] else []),
    ]
    return "\n".join(lines) + "\n"


def line(row: dict[str, Any]) -> str:
    return f"| {row['link']} | {row['cluster']} | {row['variant']} | {row['step_ms']:.0f} | {row['least_ms']:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
