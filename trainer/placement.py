"""Which shard holds which parameter, and where in the shard's flat vector. Pure: names and shapes in, offsets out.

A shard is one flat float32 vector, laid out as

    [ trainable parameters | state | metrics | header ]

Every parameter starts at a multiple of 16 floats (64 bytes) and is padded with zeros to one, so that on a CPU a slice
is a view and no parameter's arithmetic depends on what stands beside it: the same bits come out for any number of
shards. What a replica pulls and what it pushes have the same layout: values one way, gradients, new state and metrics
the other.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

LANES = 16  # floats in 64 bytes
# The first lanes of the metrics region, in this order. Replicas push the first four; the others are the host's.
METRICS = ("loss", "accuracy", "stop", "overflow", "loss_scale", "good_steps")
HEADER = ("generation", "step")  # the first lanes of the header, int32 bits


class Parameter(NamedTuple):
    """A float32 variable of the model; state (BatchNorm's moving statistics) is a parameter that is not trainable."""

    path: str  # as Keras names it, e.g. "conv/kernel"
    shape: tuple[int, ...]
    trainable: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        return -(-self.size // LANES) * LANES


class Slice(NamedTuple):
    """Where a parameter stands in its shard's flat vector; offset and padded size in floats."""

    path: str
    shape: tuple[int, ...]
    offset: int
    size: int
    padded: int


@dataclass(frozen=True)
class Shard:
    """The parameters that one task holds, as slices of one flat vector."""

    index: int
    host: str  # the task that holds it, e.g. "ps:0"
    trainable: tuple[Slice, ...]
    state: tuple[Slice, ...]

    @property
    def trainable_size(self) -> int:
        """Floats of the trainable region, which is also the size of an optimizer slot."""
        return sum(piece.padded for piece in self.trainable)

    @property
    def metrics_offset(self) -> int:
        return self.trainable_size + sum(piece.padded for piece in self.state)

    @property
    def header_offset(self) -> int:
        return self.metrics_offset + LANES

    @property
    def size(self) -> int:
        """Floats of the whole vector: what one pull, and one push, carries."""
        return self.header_offset + LANES

    @property
    def nbytes(self) -> int:
        return 4 * self.size


def place(
    parameters: Sequence[Parameter], hosts: Sequence[str], *, pins: Mapping[str, int], strategy: str = "greedy"
) -> tuple[Shard, ...]:
    """Assigns every parameter to a shard: its pin's if it has one, else the strategy's choice.

    `greedy` takes the largest first, because a big table placed last can leave one shard with twice the bytes of the
    others; equal sizes keep the model's order. `round_robin` goes through the shards in creation order, as
    TensorFlow's `replica_device_setter` does.

    Args:
        parameters: all parameters of the model, in creation order.
        hosts: the tasks that hold a shard, e.g. ("ps:0", "ps:1").
        pins: shard by pattern of paths (`conv*/kernel`); where several match, the one with the
            most characters besides `*` wins.
        strategy: "greedy" or "round_robin".

    Raises:
        ValueError: if a pin matches no parameter, or names a shard that does not exist.
    """
    _check_pins(parameters, hosts, pins)
    held: list[list[Parameter]] = [[] for _ in hosts]
    pinned = {p.path: pins[pattern] for p in parameters if (pattern := best_match(p.path, pins)) is not None}
    for path, shard in pinned.items():
        held[shard].append(next(p for p in parameters if p.path == path))
    free = [p for p in parameters if p.path not in pinned]
    if strategy == "round_robin":
        for turn, parameter in enumerate(free):
            held[turn % len(hosts)].append(parameter)
    else:
        for parameter in sorted(free, key=lambda p: -p.padded):
            min(held, key=lambda shard: sum(p.padded for p in shard)).append(parameter)
    order = {p.path: number for number, p in enumerate(parameters)}
    return tuple(
        _lay_out(index, host, sorted(shard, key=lambda p: order[p.path]))
        for index, (host, shard) in enumerate(zip(hosts, held, strict=True))
    )


def best_match(path: str, patterns: Iterable[str]) -> str | None:
    """The pattern that matches a path; of several, the one with the most characters besides `*`."""
    matching = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
    return max(matching, key=lambda pattern: len(pattern.replace("*", ""))) if matching else None


def _check_pins(parameters: Sequence[Parameter], hosts: Sequence[str], pins: Mapping[str, int]) -> None:
    paths = [p.path for p in parameters]
    for pattern, shard in pins.items():
        if not 0 <= shard < len(hosts):
            raise ValueError(f"pin {pattern!r} names shard {shard}; there are shards 0..{len(hosts) - 1}")
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
            raise ValueError(f"pin {pattern!r} matches no parameter; the nearest are {', '.join(near)}")


def _lay_out(index: int, host: str, parameters: Sequence[Parameter]) -> Shard:
    offset = 0
    regions: dict[bool, list[Slice]] = {True: [], False: []}
    for trainable in (True, False):
        for p in parameters:
            if p.trainable == trainable:
                regions[trainable].append(Slice(p.path, p.shape, offset, p.size, p.padded))
                offset += p.padded
    return Shard(index, host, tuple(regions[True]), tuple(regions[False]))
