"""A plan as a person reads it, and as JSON."""

import json
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from trainer.config.output import Output
from trainer.config.words import count, size
from trainer.plan.forecast import costs
from trainer.plan.forecast.step_time import USUAL_GBPS, Forecast, Unknown, Workload, machines_of
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.plan.shared_memory import nbytes

ORDER = "a function of (seed, epoch, step, replica); a restart continues with the next batch"
OWN_ORDER = "the data's own; a restart reads again what came before, and skips it"


def show(plan: Plan, expected: tuple[Forecast | Unknown, Workload] | None = None) -> None:
    """Prints what would run where, and how long a step is expected to take."""
    console = Output()
    console.print(f"[bold]{plan.cluster}[/bold]: {plan.describe()}")
    console.print(plan.objective, markup=False)
    for table in (_tasks(plan), _shards(plan)):
        console.print(table)
    console.print(_traffic(plan))
    for line in expected_lines(plan, *expected) if expected else ():
        console.print(line, markup=False, soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False)


def write_json(plan: Plan, path: str, expected: Forecast | Unknown | None = None) -> None:
    """Writes the plan and the expected step time as JSON."""
    value = plan.to_json() | ({"expected": expected.to_json()} if expected else {})
    Path(path).write_text(json.dumps(value, indent=1) + "\n")


def expected_lines(plan: Plan, expected: Forecast | Unknown, workload: Workload) -> list[str]:
    """The expected time of a step, its parts and assumptions, and the best number of ps."""
    if isinstance(expected, Unknown):
        return [f"expected: unknown, {expected.reason}", f"    {expected.remedy}"]
    parts, total = expected.parts, expected.parts.total
    each = ", ".join(f"{name} {1000 * secs:.1f}" for name, secs in parts._asdict().items())
    rate = f"{expected.examples / total:,.0f} examples/s"
    lines = [f"expected: {1000 * total:.1f} ms per step, {rate}: {each} ms; {parts.longest} takes longest"]
    lines.append(
        f"    largest error where fitted: {costs.STEP_ERROR:.0%} of step time, {costs.ERROR:.0%} of CPU time; "
        f"{costs.FITTED_ON}"
    )
    if workload.example_ms is None:
        example_ms = 1000 * costs.RATES.flops * workload.flops
        lines.append(
            f"    from {workload.flops / 1e6:,.1f} million operations per example, {example_ms:.3g} ms on a core; "
            "plan.example_ms=... uses a measured time instead"
        )
    if len(set(machines_of(plan.trainers, workload).values())) > 1:
        gbps = workload.link_gbps or USUAL_GBPS
        lines.append(
            f"    on machines of {count(workload.cores, 'core')} each, with links of {gbps:g} Gbit/s (plan.link_gbps)"
        )
    if len(expected.best) > 1:
        others = ", ".join(f"{ps}: {1000 * secs:.1f} ms" for ps, secs in expected.best)
        lines.append(f"best number of ps: {expected.best_ps} ({others})")
    return lines


def _tasks(plan: Plan) -> Table:
    several = any(len(task.replicas) > 1 for task in plan.tasks)
    columns = ("task", "address", "GPUs", "GPU memory", "threads", *["replicas"] * several, "replica batch", "log")
    table = _table("tasks", *columns)
    for task in plan.tasks:
        table.add_row(
            task.name + (" (chief)" if task.is_chief else ""),
            escape(_address(task)),
            ", ".join(map(str, task.gpus)) or "none",
            _memory(task),
            f"{task.intra_op_threads} intra, {task.inter_op_threads} inter",
            *[" ".join(task.replicas)] * several,
            str(plan.replica_batch) if task.job == "worker" else "",
            task.log,
        )
    return table


def _memory(task: Task) -> str:
    """What a task takes of each GPU it sees."""
    if not task.gpus:
        return ""
    if task.growth:
        return "grows"
    if task.memory_mib is not None:
        return f"{task.memory_mib:,} MiB each"
    return "nearly all" if task.memory_fraction is None else f"{task.memory_fraction:.0%} each"


def _address(task: Task) -> str:
    if task.job == "evaluator":
        return "none, reads checkpoints"
    if not task.address:
        return "none, one process"
    return task.address.removesuffix(":0") + ", a free port" if task.address.endswith(":0") else task.address


def _shards(plan: Plan) -> Table:
    table = _table("shards", "host", "parameter", "shape", "bytes", "share")
    total = sum(piece.nbytes for shard in plan.shards for piece in (*shard.trainable, *shard.state)) or 1
    for shard in plan.shards:
        pieces = [*shard.trainable, *shard.state]
        own = sum(piece.nbytes for piece in pieces)
        host = "every worker" if plan.effective_strategy.has_ring else _bucket(plan, shard)
        parameters = count(len({piece.path for piece in pieces}), "parameter")
        table.add_row(f"[bold]{host}[/bold]", parameters, "", size(own), f"{own / total:.1%}")
        for piece in pieces:
            kind = "" if piece in shard.trainable else " (state)"
            shape = "x".join(map(str, piece.shape)) or "scalar"
            part = f" [{piece.begin}:{piece.begin + piece.size}]" if piece.is_part else ""
            table.add_row(
                "", escape(piece.path + part) + kind, shape, size(4 * piece.size), f"{piece.nbytes / total:.1%}"
            )
    return table


def _bucket(plan: Plan, shard: Shard) -> str:
    """Whose shard it is, and which of several."""
    own = [other for other in plan.shards if other.host == shard.host]
    return shard.host if len(own) == 1 else f"{shard.host}, bucket {own.index(shard) + 1} of {len(own)}"


def _traffic(plan: Plan) -> str:
    links = plan.link_nbytes()
    batch = f"batch: {plan.global_batch} global, {plan.replica_batch} per replica x {count(plan.replicas, 'replica')}"
    steps = f"steps: {plan.steps}"
    if plan.train_examples:
        epochs = plan.steps * plan.global_batch / plan.train_examples
        steps += f", {epochs:.2f} epochs of {plan.train_examples:,} examples"
    steps += f"\norder of examples: {OWN_ORDER if plan.is_stream else ORDER}"
    if plan.frozen.paths:
        weights = f"{count(len(plan.frozen.paths), 'variable')}, {size(plan.frozen.nbytes)}"
        steps += f"\nfrozen: {weights}, in every worker and not in messages"
    if not links:
        return f"{batch}\n{steps}\ntraffic: none"
    per_link = sorted({(host.split(" - ")[1], nbytes) for host, nbytes in links.items()})
    shares = ", ".join(f"{size(nbytes)} per link to {host}" for host, nbytes in per_link)
    if plan.effective_strategy.has_ring:
        shares = f"{size(per_link[0][1])} from each worker to the next, around a ring"
    traffic = f"traffic: {size(sum(links.values()))} per step over {count(len(links), 'link')}; {shares}"
    if plan.wire_format.is_shared:
        shared = size(nbytes(plan.shards, plan.effective_strategy, len(plan.workers)))
        traffic += f"\n    parameters and gradients stay in shared memory ({shared}); messages only say where"
    return f"{batch}\n{steps}\n{traffic}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("bytes", "share", "threads", "replica batch") else "left"
        )
    return table
