"""The order in which the gradients of an update are summed: a balanced tree over the numbers of replicas.

    sum of first .. first + size - 1 = sum of its first half + sum of the rest

The first half is the largest power of two below the size. Each node of the tree is a span of replicas, and its sum
is the same whoever computes it: a worker that holds all replicas of a span sends one sum for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ORDER = 2  # the version of this order, in checkpoints; those without one were made replica by replica, as a chain


class Span(NamedTuple):
    """Replicas that are summed before others: a node of the tree."""

    first: int
    size: int

    @property
    def halves(self) -> tuple[Span, Span]:
        """Returns the two spans whose sums it adds; only one replica has none."""
        half = 1 << (self.size - 1).bit_length() - 1
        return Span(self.first, half), Span(self.first + half, self.size - half)

    def within(self, replicas: range) -> list[Span]:
        """Returns the fewest spans of this tree that make up its replicas in a range, in order."""
        if self.first >= replicas.stop or self.first + self.size <= replicas.start:
            return []
        if self.first >= replicas.start and self.first + self.size <= replicas.stop:
            return [self]
        return [span for half in self.halves for span in half.within(replicas)]

    def sum(self, sums: Mapping[Span, T], add: Callable[[T, T], T]) -> T:
        """Returns the sum of the span from those of spans below it, which together must make it up."""
        if self in sums:
            return sums[self]
        first, rest = (half.sum(sums, add) for half in self.halves)
        return add(first, rest)


def each_alone(count: int) -> list[Span]:
    """Returns the spans of single replicas."""
    return [Span(number, 1) for number in range(count)]


def all_of(spans: Sequence[Span]) -> Span:
    """Returns the span that others, which follow each other, make up."""
    return Span(spans[0].first, sum(span.size for span in spans))


def pushes_of(spans: Sequence[Sequence[Span]] | None, workers: int) -> list[range]:
    """Returns by worker the numbers of the vectors that it pushes, one for each of its spans; without spans, one."""
    ends = [0, *accumulate([1] * workers if spans is None else map(len, spans))]
    return [range(*pair) for pair in pairwise(ends)]
