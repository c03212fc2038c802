"""What a step's work costs, in seconds of CPU. Pure: no TensorFlow.

    seconds = calls x RATES.calls + messages x RATES.messages + bytes sent x RATES.nbytes
            + bytes of the update x RATES.update_nbytes + operations x RATES.flops + layers x RATES.layers
            + accesses to shared memory x RATES.accesses

The rates were fitted to steps of one process, and of real clusters whose vectors are sent or in shared memory, by
`make bench-growth`, which prints the lines below again.
"""

from __future__ import annotations

from typing import NamedTuple

BACKWARD = 2  # times the operations of the forward pass: gradients of a layer's weights, and of its input


class Work(NamedTuple):
    """What there is to do; or, as RATES, the seconds of CPU that one of each takes."""

    calls: float = 0.0  # of Session.run
    messages: float = 0.0  # from task to task; the two ends do a half each
    nbytes: float = 0.0  # that they carry; the two ends do a half each
    update_nbytes: float = 0.0  # that an update reads and writes; and a worker, in shared memory
    flops: float = 0.0  # floating-point operations, forward and backward
    layers: float = 0.0  # that a replica goes through, forward and backward
    accesses: float = 0.0  # to a vector in shared memory: each is a call of Python from the graph

    def plus(self, other: Work) -> Work:
        return Work(*(one + another for one, another in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(factor * one for one in self))


def secs(work: Work, rates: Work | None = None) -> float:
    """Seconds of CPU, at the rates below unless others are given."""
    return sum(count * rate for count, rate in zip(work, RATES if rates is None else rates, strict=True))


RATES = Work(
    calls=0.0005,
    messages=0.000678,
    nbytes=9.06e-10,
    update_nbytes=1.91e-10,
    flops=1.69e-11,
    layers=4.09e-05,
    accesses=0.000209,
)
TURN_SECS = 0  # of a step in which all tasks wait: for each other's threads to wake up
FITTED_ON = "AMD EPYC, 2 cores; TensorFlow 2.21.0; 2026-11-23"
ERROR = 0.22  # the largest relative error of the formula's CPU on the steps it was fitted to
STEP_ERROR = 0.37  # and that of step_time.py's steps, by the clock
