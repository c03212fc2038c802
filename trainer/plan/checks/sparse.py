"""Checks whether layers can be sparse: their rows stay on the hosts and move only when touched. Pure."""

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from trainer.config.groups import has_rates
from trainer.config.schema import OptimizerConfig, PlacementConfig, SparseConfig
from trainer.config.words import size
from trainer.faults.problems import Problem
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.strategy import Strategy
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import SparsePattern

KEY, GROWING = "placement.sparse", "placement.growing"
LARGE_NBYTES = 2**24  # of embeddings of which a step should not move all
FEW = 4  # rows for each that a step touches


def check_sparse_run(placement: PlacementConfig, optimizer: OptimizerConfig, strategy: Strategy) -> Iterator[Problem]:
    """Yields a problem for each setting that a run with sparse layers cannot have."""
    yield from _check_growing(placement)
    if not placement.has_sparse:
        if optimizer.sparse != SparseConfig():
            message = "no layer is sparse"
            yield Problem("optimizer.sparse", "no-effect", message, f"type '{KEY}=[PATTERN]' too")
        return
    key_of_layers = KEY if placement.sparse else GROWING
    if strategy.has_ring:
        message = f"rows of sparse layers are held by shard hosts, which {strategy.name} does not have"
        yield Problem(key_of_layers, "not-supported", message, "type strategy=sync, or leave it out")
    faults = {
        "optimizer.ema": optimizer.ema is not None,
        "optimizer.groups": has_rates(optimizer),
        "optimizer.name": optimizer.of_rows().measures_parameters,
        "placement.buckets": placement.buckets > 1,
    }
    for key, is_given in faults.items():
        if is_given:
            message = f"is not available with sparse layers ({key_of_layers})"
            yield Problem(key, "not-supported", message, "leave out one of them")


def _check_growing(placement: PlacementConfig) -> Iterator[Problem]:
    """Yields the problems of the settings of growing layers."""
    for key in ("growing", "min_count", "max_age"):
        for pattern, value in getattr(placement, key).items():
            if value < 1:
                message = f"{pattern} has {value}; it must be at least 1"
                yield Problem(f"placement.{key}", "out-of-range", message, f"e.g. 'placement.{key}={{{pattern}:1}}'")
            if pattern not in placement.growing:
                known = ", ".join(placement.growing) or "no layer"
                remedy = f"give it a capacity, e.g. '{GROWING}={{{pattern}:1000000}}'"
                message = f"{pattern!r} is not in {GROWING}, which names {known}"
                yield Problem(f"placement.{key}", "no-match", message, remedy)


def check_patterns(patterns: Sequence[SparsePattern], known: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each pattern that matches no Embedding layer of a model; `known` are their paths."""
    for pattern, rows, _ in patterns:
        if any(fnmatchcase(path, pattern) for path in known):
            continue
        key = KEY if rows is None else GROWING
        if not known:
            yield Problem(key, "no-match", "the model has no Embedding layer", "leave it out")
            return
        near = (difflib.get_close_matches(pattern, known, n=1, cutoff=0.3) or known)[0]
        message = f"{pattern!r} matches no Embedding layer; the model has {', '.join(known)}"
        yield Problem(key, "no-match", message, f"e.g. '{key}={f'[{near}]' if rows is None else f'{{{near}:{rows}}}'}'")


def check_memory(layout: TableLayout, machine: Machine) -> Iterator[Problem]:
    """Yields a problem if the rows of sparse layers do not fit into the memory of this machine."""
    if machine.memory_bytes is not None and layout.nbytes > machine.memory_bytes:
        rows = sum(block.rows for block in layout.blocks)
        message = (
            f"{rows:,} rows with their slots take {size(layout.nbytes)}, and this machine has "
            f"{size(machine.memory_bytes)} of memory"
        )
        remedy = "use fewer or narrower rows, or an optimizer with fewer slots, e.g. sgd"
        yield Problem(KEY, "over-capacity", message, remedy)


def warn_of_dense(description: Description, batch: int) -> Iterator[Problem]:
    """Warns of large embeddings that move as a whole in each step although it touches few rows."""
    sizes = {p.path: p for p in description.parameters}
    for path, lookups in description.lookups.items():
        dense = sizes.get(f"{path}/embeddings")
        if dense is None or 4 * dense.size < LARGE_NBYTES or lookups * batch > dense.shape[0] / FEW:
            continue
        message = f"{path} has {dense.shape[0]:,} rows ({size(4 * dense.size)}), and a step touches at most "
        message += f"{lookups * batch:,} of them but moves all"
        yield Problem(KEY, "slow", message, f"type '{KEY}=[{path}]'")
