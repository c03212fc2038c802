"""Assigns parameters to shards, and to offsets in the shard's flat vector. Pure: names and shapes in, offsets out.

A shard is one flat float32 vector, laid out as

    [ trainable parameters | state | metrics | header ]

Every parameter starts at a multiple of 16 floats (64 bytes) and is padded with zeros to one, so that on a CPU a slice
is a view and no parameter's arithmetic depends on its neighbours: the same bits come out for any number of
shards. What a replica pulls and what it pushes have the same layout: values one way, gradients, new state and metrics
the other.

A parameter larger than `placement.max_part_mib` is cut into parts, which are placed as parameters are. Where a given
size cuts it depends on the parameter alone, never on the shards: the norm of clipped gradients is summed part by part,
so it is the same too. `auto` looks for the largest size with which greedy gives no host more than BALANCED times
its share. That size depends on the hosts, so clipped gradients are not cut by it.

A host may hold its parameters in several shards, `placement.buckets`, each of which is pulled, pushed and updated on
its own: the first has the last parameters of the model, in whose gradients the backward pass begins.
"""

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Protocol

from trainer.config.schema import AUTO
from trainer.plan.layout import LANES, Parameter, Shard, Slice

PAD_NBYTES = 4 * LANES
BALANCED = 1.1  # times the mean of all hosts: what auto lets one hold
SMALL_NBYTES = 2**16  # of a host's share: below it a message takes longer than the bytes in it, so nothing is cut


class Chooser(Protocol):
    """Chooses the shard of the next parameter; `device_setter` uses it too."""

    def choose(self, nbytes: int) -> int:
        """Returns the shard for a parameter of this size, and counts it there."""

    def hold(self, shard: int, nbytes: int) -> None:
        """Counts a parameter that was assigned to a shard by a pin."""


class RoundRobin:
    """Assigns to the shards in turn, as TensorFlow's `replica_device_setter` does."""

    def __init__(self, shards: int) -> None:
        self._turns = itertools.cycle(range(shards))

    def choose(self, nbytes: int) -> int:
        return next(self._turns)

    def hold(self, shard: int, nbytes: int) -> None:
        """Does nothing: a pinned parameter takes no turn."""


class Lightest:
    """Assigns to the shard with the fewest bytes so far; among equal ones, to the first."""

    def __init__(self, shards: int) -> None:
        self._nbytes = [0] * shards

    def choose(self, nbytes: int) -> int:
        shard = self._nbytes.index(min(self._nbytes))
        self.hold(shard, nbytes)
        return shard

    def hold(self, shard: int, nbytes: int) -> None:
        self._nbytes[shard] += nbytes


CHOOSERS: Mapping[str, Callable[[int], Chooser]] = {"greedy": Lightest, "round_robin": RoundRobin}


def place(
    parameters: Sequence[Parameter],
    hosts: Sequence[str],
    *,
    pins: Mapping[str, int],
    strategy: str = "greedy",
    max_part_mib: float | str | None = None,
    buckets: int = 1,
    sums: int = 0,
    sums_every: int = 1,
) -> tuple[Shard, ...]:
    """Assigns every parameter, or every part of one, to a host: that of its pin, or else the strategy's choice.

    `greedy` takes the largest first, because a big table placed last can leave one shard with twice the bytes of the
    others; equal sizes keep the model's order. `round_robin` goes through the shards in creation order, as
    TensorFlow's `replica_device_setter` does.

    Args:
        parameters: in creation order.
        pins: shard by pattern of paths (`conv*/kernel`); where several match, the one with the
            most characters besides `*` wins. A pin holds for all parts of a parameter.
        max_part_mib: a larger parameter is cut into parts of at most this size; none: it stays whole; AUTO: the largest
            size that balances the hosts, for `greedy` alone, with which a parameter that has a pin stays whole.
        buckets: shards of each host, of about equal size; fewer where it holds fewer parameters and parts.
        sums, sums_every: of the first shard.

    Raises:
        ValueError: if a pin matches no parameter, or names a shard that does not exist.
    """
    for pin, shard in pins.items():
        for fault, _ in pin_faults(parameters, len(hosts), pin, shard):
            raise ValueError(fault)
    pinned = {p.path: pins[pattern] for p in parameters if (pattern := best_match(p.path, pins)) is not None}
    if isinstance(max_part_mib, str):
        assert (max_part_mib, strategy) == (AUTO, "greedy")
        held = _balance(parameters, pinned, len(hosts))
    else:
        pieces = [piece for parameter in parameters for piece in cut(parameter, max_part_mib)]
        held = _assign(pieces, pinned, len(hosts), strategy)
    trainable = {p.path for p in parameters if p.trainable}
    buckets_of = [
        (host, bucket) for host, pieces in zip(hosts, held, strict=True) for bucket in _in_buckets(pieces, buckets)
    ]
    first, *others = (_lay_out(index, host, bucket, trainable) for index, (host, bucket) in enumerate(buckets_of))
    return (replace(first, sums=sums, sums_every=sums_every), *others)


def _assign(pieces: Sequence[Slice], pinned: Mapping[str, int], hosts: int, strategy: str) -> list[list[Slice]]:
    """Returns the pieces that each host holds, in order."""
    chooser = CHOOSERS[strategy](hosts)
    chosen: dict[Slice, int] = {}
    for piece in pieces:
        if piece.path in pinned:
            chosen[piece] = pinned[piece.path]
            chooser.hold(chosen[piece], piece.nbytes)
    free = [piece for piece in pieces if piece not in chosen]
    for piece in sorted(free, key=lambda p: -p.padded) if strategy == "greedy" else free:
        chosen[piece] = chooser.choose(piece.nbytes)
    return [[piece for piece in pieces if chosen[piece] == host] for host in range(hosts)]


def _balance(parameters: Sequence[Parameter], pinned: Mapping[str, int], hosts: int) -> list[list[Slice]]:
    """Returns the pieces that each host holds, cutting unpinned parameters into the largest parts that balance.

    No host that gets such a part holds more than BALANCED times its share. A small model stays whole.
    """
    whole = [piece for parameter in parameters for piece in cut(parameter, None)]
    share = sum(piece.nbytes for piece in whole) / hosts
    lanes = [piece.padded // LANES for piece in whole if piece.path not in pinned]
    # Greedy gives no host more than its share and one part: parts of this size always balance.
    least = max(1, int((BALANCED - 1) * share) // PAD_NBYTES)
    sizes = {-(-size // count) for size in lanes for count in range(1, size // least + 1)} | {least}
    for size in sorted(sizes, reverse=True) if share >= SMALL_NBYTES else ():
        mib = size * PAD_NBYTES / 2**20
        pieces = [piece for p in parameters for piece in cut(p, None if p.path in pinned else mib)]
        held = _assign(pieces, pinned, hosts, "greedy")
        free = [own for own in held if any(piece.path not in pinned for piece in own)]
        if all(sum(piece.nbytes for piece in own) <= BALANCED * share for own in free):
            return held
    return _assign(whole, pinned, hosts, "greedy")


def cut(parameter: Parameter, max_part_mib: float | None) -> list[Slice]:
    """Returns the parts of a parameter, or its whole, at offset 0: as few as fit the limit, of nearly equal size.

    Every part but the last is a multiple of LANES floats, so that parts are aligned in the parameter too.
    """
    lanes = -(-parameter.size // LANES)
    most = max(lanes, 1) if max_part_mib is None else max(1, int(max_part_mib * 2**20) // PAD_NBYTES)
    count = max(1, -(-lanes // most))
    least, longer = divmod(lanes, count)
    pieces, begin = [], 0
    for part in range(count):
        padded = LANES * (least + (part < longer))
        size = min(padded, parameter.size - begin)
        pieces.append(Slice(parameter.path, parameter.shape, 0, size, padded, begin))
        begin += size
    return pieces


def best_match(path: str, patterns: Iterable[str]) -> str | None:
    """Returns the pattern that matches a path; of several, the one with the most characters besides `*`."""
    matching = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
    return max(matching, key=lambda pattern: len(pattern.replace("*", ""))) if matching else None


def pin_faults(parameters: Sequence[Parameter], shards: int, pattern: str, shard: int) -> Iterator[tuple[str, str]]:
    """Yields the problems of a pin, with a similar valid one."""
    paths = [p.path for p in parameters]
    matches = any(fnmatchcase(path, pattern) for path in paths)
    near = [] if matches else difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
    better = f"{(near or [pattern])[0]}:{min(max(shard, 0), shards - 1)}"
    if not 0 <= shard < shards:
        yield f"pin {pattern!r} names shard {shard}; available: shards 0..{shards - 1}", better
    if not matches:
        yield f"pin {pattern!r} matches no parameter; the nearest are {', '.join(near)}", better


def _in_buckets(pieces: Sequence[Slice], count: int) -> list[list[Slice]]:
    """Cuts a sequence of pieces into `count` runs of about equal bytes, or fewer; the last run comes first."""
    total, placed = sum(piece.nbytes for piece in pieces), 0
    runs: list[list[Slice]] = [[]]
    for piece in reversed(pieces):
        is_full = placed + piece.nbytes / 2 > total * len(runs) / count  # most of the piece is beyond this run's share
        if runs[-1] and is_full and len(runs) < count:
            runs.append([])
        runs[-1].insert(0, piece)
        placed += piece.nbytes
    return runs


def _lay_out(index: int, host: str, pieces: Sequence[Slice], trainable: Collection[str]) -> Shard:
    offset = 0
    regions: dict[bool, list[Slice]] = {True: [], False: []}
    for is_trainable in (True, False):
        for piece in pieces:
            if (piece.path in trainable) == is_trainable:
                regions[is_trainable].append(piece._replace(offset=offset))
                offset += piece.padded
    return Shard(index, host, tuple(regions[True]), tuple(regions[False]))
