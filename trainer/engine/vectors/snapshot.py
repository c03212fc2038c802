"""The state of a run at one global step, by parameter path, which a checkpoint holds for any cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.engine.vectors import packing
from trainer.plan.layout import METRICS, Shard

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """Parameters, state (BatchNorm statistics) and optimizer slots, all of the same global step.

    Under async a shard may be some steps ahead; the lowest step counts.
    """

    step: int
    parameters: Arrays
    state: Arrays
    slots: dict[str, Arrays]  # by slot name; empty: every slot at its first value
    loss: float | None = None  # of the update that led here, if it is known
    sums: tuple[float, ...] = ()  # of the metrics' variables, as StepResult has them
    stop: float = 0.0  # of METRICS: more than 0 if replicas must stop
    reductions: int = 0  # of the learning rate, since no evaluation improved
    bad: int = 0  # newest step since the load whose update was left out: a loss or a gradient was not finite
    tables: str = ""  # the checkpoint that has the rows of tables; empty: their first values

    def to_tensors(self) -> Arrays:
        """Returns one flat mapping, as a checkpoint stores it."""
        named = {f"parameters/{path}": value for path, value in self.parameters.items()}
        named |= {f"state/{path}": value for path, value in self.state.items()}
        for slot, values in self.slots.items():
            named |= {f"slots/{slot}/{path}": value for path, value in values.items()}
        return dict(sorted(named.items()))

    @classmethod
    def from_tensors(cls, step: int, tensors: Arrays) -> Snapshot:
        parts: dict[str, Arrays] = {"parameters": {}, "state": {}}
        slots: dict[str, Arrays] = {}
        for name, value in tensors.items():
            kind, rest = name.split("/", 1)
            if kind == "slots":
                slot, path = rest.split("/", 1)
                slots.setdefault(slot, {})[path] = value
            else:
                parts[kind][rest] = value
        return cls(step, parts["parameters"], parts["state"], slots)

    @classmethod
    def from_flats(
        cls, step: int, shards: Sequence[Shard], flats: Sequence[np.ndarray], slots: Sequence[dict[str, np.ndarray]]
    ) -> Snapshot:
        trainable = [shard.trainable for shard in shards]
        named = {
            name: packing.join((shard.slot_pieces(name), own[name]) for shard, own in zip(shards, slots, strict=True))
            for name in slots[0]
        }
        parameters = packing.join(zip(trainable, flats, strict=True))
        state = packing.join(zip((shard.state for shard in shards), flats, strict=True))
        loss, stop, _, bad, reductions, _ = flats[0][shards[0].metrics_offset :][: len(METRICS)].tolist()
        sums = tuple(packing.sums_in(flats[0], shards[0]).tolist())
        return cls(step, parameters, state, named, loss, sums, stop, int(reductions), int(bad))

    def to_flats(self, shard: Shard, fills: Mapping[str, float], *, generation: int) -> list[np.ndarray]:
        """Returns the vectors to load into a shard: its own, then its slots; `fills` has initial values of slots."""
        flat = packing.to_flat(shard, self.parameters | self.state, generation=generation, step=self.step)
        for name in ("stop", "reductions"):
            flat[shard.metrics_offset + METRICS.index(name)] = getattr(self, name)
        if len(self.sums) == shard.sums:  # else they are of other metrics
            packing.sums_in(flat, shard)[:] = self.sums
        return [flat, *(packing.to_slot(shard, name, self.slots.get(name), fill) for name, fill in fills.items())]
