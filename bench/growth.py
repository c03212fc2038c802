"""What a step costs as a cluster grows: CPU, messages and bytes for 1 to 16 workers and 1 to 4 ps, on this machine.

    python -m bench.growth [--quick]

writes bench/results/growth.md and growth.json, fits the rates of trainer/plan/forecast/costs.py to what was
measured, and prints the lines to put there. Where runs can be isolated, bytes on the wire are of these runs alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.facts import cpu_model
from bench.steady import RunError, steady_run
from trainer.config.compose import load
from trainer.launch.describe import describe
from trainer.launch.processes.isolation import why_impossible
from trainer.observe.machine import this_machine, version_of
from trainer.plan.description import Question
from trainer.plan.forecast import step_time
from trainer.plan.forecast.costs import Work
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan

RESULTS = Path(__file__).parent / "results"
WARM_STEPS, WINDOW_SECS = 30, 5.0

# (overrides, examples of a replica): what each stresses
WORKLOADS = {
    "null": (["model=mlp", "model.options.depth=0", "data=synthetic", "data.options.shape=[4]"], 8),  # messages
    "deep": (["model=mlp", "model.options={depth:20,width:64}", "data=mnist_10k"], 16),  # layers
    "wide": (["model=mlp", "model.options={depth:2,width:1024}", "data=mnist_10k"], 8),  # bytes
    "cnn": (["model=cnn", "data=mnist_10k"], 32),  # operations
}
# Vectors are sent, on one machine too, for what a byte sent costs; or stay in memory, for what it costs to share one.
SIZES = {
    "": ["local"],
    "float32": ["1ps1w", "1ps2w", "1ps4w", "1ps8w", "1ps16w", "2ps4w", "4ps4w", "2w", "4w"],
    "memory": ["1ps1w", "1ps2w", "1ps4w", "2ps4w", "2w"],
}
QUICK_SIZES = {"": ["local"], "float32": ["1ps1w", "1ps2w", "1ps4w", "2ps2w", "2w"], "memory": ["1ps2w", "2ps2w"]}


class Fit(NamedTuple):
    """The formula, and how well it fits."""

    rates: Work
    turn_secs: float
    errors: tuple[float, ...]  # relative, of each row's CPU


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="fewer sizes and shorter windows, only printed")
    arguments.add_argument("--fit-only", action="store_true", help="fit to growth.json as it is, and measure nothing")
    options = arguments.parse_args()
    if options.fit_only:
        results = json.loads((RESULTS / "growth.json").read_text())
    else:
        has_network = not why_impossible()
        sizes, secs = (QUICK_SIZES, 2.0) if options.quick else (SIZES, WINDOW_SECS)
        before = machine()
        rows = list(measure_all(sizes, secs))
        results = {"machine": before, "own_network": has_network, "rows": rows}
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "growth.md").write_text(page(results))
    print(page(results))
    print("\nfor trainer/plan/forecast/costs.py:\n")
    fitted = fit(results["rows"])
    print(constants(results["machine"], fitted, step_errors(results["rows"], fitted)))
    return 0


def measure_all(sizes: Mapping[str, Sequence[str]], secs: float) -> Iterable[dict[str, Any]]:
    """The rows of all workloads on the sizes of each wire."""
    on_wires = [(size, wire) for wire, of_wire in sizes.items() for size in of_wire]
    for workload, (size, wire) in itertools.product(WORKLOADS, on_wires):
        try:
            row = measure(workload, size, wire, secs)
        except RunError as error:
            print(f"{workload} on {size} {wire} is left out: {error}", file=sys.stderr)
            continue
        print(f"{workload} on {size} {wire}: {1000 * row['cpu_secs']:.2f} ms of CPU a step", file=sys.stderr)
        yield row


def measure(workload: str, size: str, wire: str, secs: float) -> dict[str, Any]:
    """One run: seconds of one step, of CPU and by the clock, and what the plan says that it consists of."""
    options, examples = WORKLOADS[workload]
    options = [*options, *_on(size, wire)]
    plan, step_workload = planned(options, examples)
    work = step_time.total(step_time.work_of(plan, step_workload))
    batch = f"train.batch_size={plan.global_batch}"
    with steady_run([*options, batch]) as run:
        run.wait_for_step(WARM_STEPS)
        before = run.received_nbytes()
        sample = run.measure(secs)
        after = run.received_nbytes()
    by_job = {
        job: sum(value for task, value in sample.cpu_secs.items() if task.startswith(job)) / sample.steps
        for job in ("ps", "worker")
    }
    return {
        "workload": workload,
        "size": size,
        "wire": wire,
        "ps": sum(task.job == "ps" for task in plan.tasks),
        "workers": len(plan.workers),
        "steps": sample.steps,
        "secs": sample.secs / sample.steps,
        "cpu_secs": sample.step_cpu_secs,
        "cpu_secs_by_job": by_job,
        "sent_nbytes": (after - before) / sample.steps,
        "work": work._asdict(),
    }


def _on(size: str, wire: str) -> list[str]:
    return [f"cluster={size}", *(["strategy=sync", f"strategy.wire={wire}"] if wire else [])]


def planned(overrides: Sequence[str], examples: int) -> tuple[Plan, step_time.Workload]:
    """The plan of a run with so many examples for each replica."""
    here = this_machine()
    config = load([*overrides, "train.batch_size=16"], lambda config: [])
    config.train.batch_size = examples * config.cluster.worker
    question = Question.about(config.model, config.data, user=None, seed=config.seed)
    description = describe(question)
    step_workload = step_time.Workload.of(description, config.optimizer, config.plan, cores=here.cores)
    return make_plan(config, description, here), step_workload


def fit(rows: Sequence[Mapping[str, Any]]) -> Fit:
    """The rates, none below zero, with the least sum of squares of the relative errors of CPU seconds.

    What a step takes beyond that, in the fastest case that has hosts of shards, is waiting.
    """
    counts = np.array([list(Work(**row["work"])) for row in rows])
    cpu = np.array([row["cpu_secs"] for row in rows])
    rates = Work(*nonnegative(counts / cpu[:, None], np.ones(len(rows))).tolist())
    errors = (counts @ np.array(rates) - cpu) / cpu
    first = [row for row in rows if (row["workload"], row["size"], row["wire"]) == ("null", "1ps1w", "float32")]
    waits = [row["secs"] - row["cpu_secs"] for row in first]
    return Fit(rates, max(0.0, min(waits, default=0.0)), tuple(errors.tolist()))


def step_errors(rows: Sequence[Mapping[str, Any]], fitted: Fit) -> list[float]:
    """Relative, of what mode=plan would expect with these rates, to what a step took by the clock."""
    errors = []
    for row in rows:
        options, examples = WORKLOADS[row["workload"]]
        plan, step_workload = planned([*options, *_on(row["size"], row["wire"])], examples)
        parts = step_time.parts_of(plan, step_workload, rates=fitted.rates, turn_secs=fitted.turn_secs)
        errors.append(parts.total / row["secs"] - 1)
    return errors


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimizes |matrix x - target|: of the few columns there are, every choice is tried."""
    count = matrix.shape[1]
    best, least = np.zeros(count), float(np.sum(target**2))
    for chosen in itertools.product([False, True], repeat=count):
        columns = np.flatnonzero(chosen)
        if not len(columns) or not np.all(matrix[:, columns].any(axis=0)):
            continue
        scale = np.abs(matrix[:, columns]).max(axis=0)  # from 1e-10 to 1
        solution = np.linalg.lstsq(matrix[:, columns] / scale, target, rcond=None)[0] / scale
        rest = float(np.sum((matrix[:, columns] @ solution - target) ** 2))
        if (solution >= 0).all() and rest < least:
            best, least = np.zeros(count), rest
            best[columns] = solution
    return best


def constants(machine: Mapping[str, Any], fitted: Fit, of_steps: Sequence[float]) -> str:
    """The end of trainer/plan/forecast/costs.py."""
    rates = "\n".join(f"    {name}={value:.3g}," for name, value in fitted.rates._asdict().items())
    where = f"{machine['cpu']}, {machine['cores']} cores; TensorFlow {machine['tensorflow']}; {machine['date']}"
    worst = max(map(abs, fitted.errors))
    return "\n".join(
        [
            f"RATES = Work(\n{rates}\n)",
            "TURN_SECS = "
            f"{fitted.turn_secs:.2g}  # of a step in which all tasks wait: for each other's threads to wake up",
            f'FITTED_ON = "{where}"',
            f"ERROR = {worst:.2f}  # the largest relative error of the formula's CPU on the steps it was fitted to",
            f"STEP_ERROR = {max(map(abs, of_steps)):.2f}  # and that of step_time.py's steps, by the clock",
        ]
    )


def page(results: Mapping[str, Any]) -> str:
    """The table, as Markdown."""
    rows, machine = results["rows"], results["machine"]
    fitted = fit(rows)
    lines = [
        "# What a step costs as a cluster grows",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, TensorFlow {machine['tensorflow']}, {machine['date']}, load of "
        f"the machine before {machine['load']:.1f}. One step is one update; every replica has the same examples in "
        "every cluster, so the work of a step grows with the workers. Messages and MiB are tensors from task to task, "
        "by the plan; sent MiB are what the loopback device carried"
        + (", in a network of their own." if results["own_network"] else ", of everything on this machine."),
        "",
        "| workload | cluster | wire | CPU ms a step | each worker's | each ps's | formula | messages | MiB "
        "| sent MiB | ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, error in zip(rows, fitted.errors, strict=True):
        by_job = row["cpu_secs_by_job"]
        of_ps = f"{1000 * by_job['ps'] / row['ps']:.2f}" if row["ps"] else ""
        lines.append(
            f"| {row['workload']} | {row['size']} | {row['wire']} | {1000 * row['cpu_secs']:.2f} "
            f"| {1000 * by_job['worker'] / row['workers']:.2f} | {of_ps} | {100 * error:+.0f} % "
            f"| {row['work']['messages']:.0f} | {row['work']['nbytes'] / 2**20:.3f} "
            f"| {row['sent_nbytes'] / 2**20:.3f} | {1000 * row['secs']:.2f} |"
        )
    lines += [
        "",
        "What each more worker adds, beside 1 ps that vectors are sent to, in ms of CPU a step:",
        "",
        *growth_lines(rows),
    ]
    return "\n".join(lines) + "\n"


def growth_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each workload, from each size to the next: a step that is linear in the workers adds the same each time."""
    lines = []
    for workload in WORKLOADS:
        of_one = [row for row in rows if (row["workload"], row["ps"], row["wire"]) == (workload, 1, "float32")]
        of_one = sorted(of_one, key=lambda row: row["workers"])
        added = [
            f"{low['workers']} to {high['workers']}: "
            f"{1000 * (high['cpu_secs'] - low['cpu_secs']) / (high['workers'] - low['workers']):.2f}"
            for low, high in itertools.pairwise(of_one)
        ]
        if added:
            lines.append(f"- {workload}: {', '.join(added)}")
    return lines


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": this_machine().cores,
        "tensorflow": version_of("tensorflow-cpu") or version_of("tensorflow") or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
