"""A plan as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.plan.layout import Shard, Slice


def shard_to_json(shard: Shard) -> dict[str, Any]:
    pieces = {"trainable": [p._asdict() for p in shard.trainable], "state": [p._asdict() for p in shard.state]}
    return {"index": shard.index, "host": shard.host, "nbytes": shard.nbytes} | pieces


def shard_from_json(value: Mapping[str, Any]) -> Shard:
    def slices(pieces: Sequence[Mapping[str, Any]]) -> tuple[Slice, ...]:
        return tuple(Slice(**{**piece, "shape": tuple(piece["shape"])}) for piece in pieces)

    return Shard(value["index"], value["host"], slices(value["trainable"]), slices(value["state"]))
