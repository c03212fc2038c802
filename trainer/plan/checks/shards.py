"""Warns of shards that are uneven, empty, or more than the machine has cores for."""

import math
from collections.abc import Iterator, Mapping, Sequence

from trainer.faults.problems import Problem
from trainer.plan.devices import Machine
from trainer.plan.layout import Shard, Slice
from trainer.plan.placement import SMALL_NBYTES, best_match
from trainer.plan.plan import Task


def warn_of_shards(
    shards: Sequence[Shard], tasks: Sequence[Task], pins: Mapping[str, int], machine: Machine, *, can_cut: bool
) -> Iterator[Problem]:
    hosts = {shard.host for shard in shards}
    for shard in shards:
        if not any(other.trainable for other in shards if other.host == shard.host):
            message = f"{shard.host} holds no parameter"
            yield Problem("cluster", "no-effect", message, f"{len(hosts) - 1} shards are enough")
    yield from _warn_of_imbalance(shards, pins, can_cut=can_cut)
    workers = sum(task.job == "worker" for task in tasks)
    if workers > machine.cores:
        message = f"{workers} workers share {machine.cores} cores"
        yield Problem("cluster", "slow", message, "fewer workers may be faster here")


def _warn_of_imbalance(shards: Sequence[Shard], pins: Mapping[str, int], *, can_cut: bool) -> Iterator[Problem]:
    """Warns of imbalance that `auto` does not prevent, because it is off or a pin keeps parameters whole."""
    pieces_of: dict[str, list[Slice]] = {}
    for shard in shards:
        pieces_of.setdefault(shard.host, []).extend([*shard.trainable, *shard.state])
    nbytes = {host: sum(piece.nbytes for piece in pieces) for host, pieces in pieces_of.items()}
    total, heaviest = sum(nbytes.values()), max(nbytes, key=nbytes.__getitem__)
    even = total / len(pieces_of)
    if even >= SMALL_NBYTES and nbytes[heaviest] > 1.5 * even:
        largest = max(pieces_of[heaviest], key=lambda piece: piece.nbytes)
        share, of_it = f"{nbytes[heaviest] / total:.0%}", f"{largest.nbytes / total:.0%}"
        message = f"{heaviest} holds {share} of the bytes, and {largest.path} alone {of_it}"
        parts = f"type placement.max_part_mib={_round_up(even / 2**20)} to split it into parts"
        greedy = "type placement.name=greedy and leave out placement.pins"
        is_cut = can_cut and largest.nbytes > even and best_match(largest.path, pins) is None
        yield Problem("placement", "slow", message, parts if is_cut else greedy)


def _round_up(mib: float) -> str:
    """Rounds up to a whole number, or a number below 1 to two digits: rounding down would add a part."""
    unit = 1.0 if mib >= 1 else 10.0 ** (math.floor(math.log10(mib)) - 1)
    return f"{math.ceil(mib / unit) * unit:g}"
