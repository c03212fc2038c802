"""The byte layout of a shard: one flat vector of parameters, state, metrics and header. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

LANES = 16  # floats in 64 bytes
TAGS = 2  # integers that identify the state of a vector: generation and step
# The first lanes of the metrics region, in this order; the loss is a mean, the next three say that a replica did.
# In what is pulled, `stop` is above 1 if no task takes another step, `bad` is the newest step whose update was skipped
# because a loss or a gradient was not finite, and `reductions` is how often the learning rate was reduced. In what is
# pushed, `divisor` is the factor by which loss and gradients were multiplied: 1, unless the shard is counted.
METRICS = ("loss", "stop", "overflow", "bad", "reductions", "divisor")
HEADER = ("generation", "step")  # the first lanes of the header, int32 bits


class Parameter(NamedTuple):
    """A float32 variable of the model; state (BatchNorm's moving statistics) is a parameter that is not trainable."""

    path: str  # as Keras names it, e.g. "conv/kernel"
    shape: tuple[int, ...]
    trainable: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Shape = tuple[int, ...]
# Optimizer slots that do not have a parameter's shape, by name: from its shape to theirs, None where they have nothing
# of it. Means over rows and columns of the last two axes stand for what is kept of a matrix.
FACTORED_SLOTS: Mapping[str, Callable[[Shape], Shape | None]] = {
    "row": lambda shape: shape[:-1] if len(shape) > 1 else None,
    "column": lambda shape: (*shape[:-2], shape[-1]) if len(shape) > 1 else None,
    "unfactored": lambda shape: shape if len(shape) < 2 else None,
}


def slot_shape(slot: str, shape: Shape) -> Shape | None:
    """Returns the shape of a parameter's optimizer slot; None if it has none."""
    return FACTORED_SLOTS[slot](shape) if slot in FACTORED_SLOTS else shape


class FrozenWeights(NamedTuple):
    """Variables that training never changes; every task that computes has its own copy, and no shard holds them."""

    paths: tuple[str, ...] = ()
    nbytes: int = 0
    sha256: str = ""  # of their paths, types and values, and of what layers have adapted to


class Slice(NamedTuple):
    """The position of a parameter, or a part of one, in its shard's flat vector; sizes are in floats."""

    path: str
    shape: tuple[int, ...]  # of the whole parameter
    offset: int  # in the shard's vector
    size: int
    padded: int
    begin: int = 0  # in the flattened (row-major) parameter

    @property
    def is_part(self) -> bool:
        return self.size < math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that it takes in its shard, including padding."""
        return 4 * self.padded


@dataclass(frozen=True)
class Shard:
    """The parameters that one task holds, or a bucket of them, as slices of one flat vector."""

    index: int
    host: str  # the task that holds it, e.g. "ps:0"
    trainable: tuple[Slice, ...]
    state: tuple[Slice, ...]
    sums: int = 0  # floats behind METRICS that updates add up: variables of Keras metrics, on the first shard only
    sums_every: int = 1  # steps after which they begin again at zero
    unreached: tuple[str, ...] = ()  # trainable parameters of the model that its loss does not reach
    is_counted: bool = False  # a mean over replicas weights each by the count that its loss is divided by

    @cached_property
    def trainable_size(self) -> int:
        """Returns the floats of the trainable region."""
        return sum(piece.padded for piece in self.trainable)

    def slot_pieces(self, slot: str) -> tuple[Slice, ...]:
        """Returns the position of each parameter in an optimizer slot."""
        if slot not in FACTORED_SLOTS:
            return self.trainable
        pieces, offset = [], 0
        for piece in self.trainable:
            shape = slot_shape(slot, piece.shape)
            if shape is not None:
                size = math.prod(shape)
                padded = -(-size // LANES) * LANES
                pieces.append(Slice(piece.path, shape, offset, size, padded))
                offset += padded
        return tuple(pieces)

    def slot_size(self, slot: str) -> int:
        """Returns the floats of an optimizer slot."""
        return sum(piece.padded for piece in self.slot_pieces(slot))

    @cached_property
    def metrics_offset(self) -> int:
        return self.trainable_size + sum(piece.padded for piece in self.state)

    @property
    def metrics_size(self) -> int:
        """Returns the floats of the metrics region."""
        return -(-(len(METRICS) + self.sums) // LANES) * LANES

    @property
    def header_offset(self) -> int:
        return self.metrics_offset + self.metrics_size

    @cached_property
    def size(self) -> int:
        """Returns the floats of the whole vector, which one pull or push carries."""
        return self.header_offset + LANES

    @property
    def nbytes(self) -> int:
        return 4 * self.size


class WireFormat(NamedTuple):
    """The format of the message that carries a shard's vector, or its location."""

    numbers: Callable[[Shard], int]
    number_nbytes: int = 4
    is_shared: bool = False  # vectors stay in memory that all tasks share

    def nbytes(self, shard: Shard) -> int:
        return self.numbers(shard) * self.number_nbytes


WIRES: Mapping[str, WireFormat] = {  # see engine/vectors/wire.py
    "float32": WireFormat(lambda shard: shard.size),
    "bfloat16": WireFormat(lambda shard: 2 * shard.size - shard.trainable_size, number_nbytes=2),
    "memory": WireFormat(lambda shard: TAGS + 1, is_shared=True),
}
