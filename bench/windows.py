"""Windows of two contestants in turn, A B B A: one runs while the other stands still."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench import processes
from bench.contestants import examples_of
from bench.running import Running

SETTLE_SECS = 0.3  # of a contestant that was just resumed, before it is looked at


@dataclass(frozen=True)
class Window:
    """The measurements of one contestant while it ran alone; per step, except the rate."""

    examples_per_sec: float
    cpu_ms: Mapping[str, float]  # by process
    wire_nbytes: float  # on the loopback interface
    wire_packets: float


def alternate(ours: Running, other: Running, *, rounds: int, secs: float) -> tuple[list[Window], list[Window]]:
    """Measures both, which are paused, in turn; they are paused afterwards.

    Returns:
        Windows of each; those of the same number are neighbours in time.
    """
    of_ours, of_other = [], []
    for _ in range(rounds):
        of_ours.append(measure(ours, secs))
        of_other.append(measure(other, secs))
        of_other.append(measure(other, secs))
        of_ours.append(measure(ours, secs))
    return of_ours, of_other


def measure(running: Running, secs: float) -> Window:
    """Lets a contestant run from the end of a step to that of another, at least so many seconds later."""
    running.resume()
    try:
        time.sleep(SETTLE_SECS)
        first, began = running.next_step()
        process = processes.tree(running.pid)[-1]  # one in the network of its tasks, which may be their own
        cpu, wire = running.cpu_secs(), processes.loopback(process)
        time.sleep(secs)
        last, ended = running.next_step()
        cpu_after, wire_after = running.cpu_secs(), processes.loopback(process)
    finally:
        running.pause()
    steps = last - first
    return Window(
        examples_per_sec=steps * examples_of(running.contestant, running.workload) / (ended - began),
        cpu_ms={name: 1000 * max(0.0, cpu_after[name] - cpu.get(name, 0.0)) / steps for name in cpu_after},
        wire_nbytes=(wire_after[0] - wire[0]) / steps,
        wire_packets=(wire_after[1] - wire[1]) / steps,
    )
