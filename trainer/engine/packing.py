"""Between named tensors and the flat vectors of the shards (laid out in placement.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from trainer.placement import LANES, Shard, Slice

Tensors = Mapping[str, tf.Tensor]  # by parameter path
Arrays = Mapping[str, np.ndarray]


def unpack(flats: Sequence[tf.Tensor], shards: Sequence[Shard]) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Cuts the shards' vectors into (parameters, state) by path."""
    parameters: dict[str, tf.Tensor] = {}
    state: dict[str, tf.Tensor] = {}
    for flat, shard in zip(flats, shards, strict=True):
        parameters.update((piece.path, _cut(flat, piece)) for piece in shard.trainable)
        state.update((piece.path, _cut(flat, piece)) for piece in shard.state)
    return parameters, state


def pack(shard: Shard, gradients: Tensors, state: Tensors, metrics: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    """Lays out what a replica pushes to one shard: [size] float32.

    Args:
        gradients, state: by path; only the shard's own are read.
        metrics: [3] in the order of placement.METRICS.
        header: [LANES], as it was pulled.
    """
    pieces = [_pad(gradients[piece.path], piece) for piece in shard.trainable]
    pieces += [_pad(state[piece.path], piece) for piece in shard.state]
    return tf.concat([*pieces, tf.pad(metrics, [[0, LANES - metrics.shape[0]]]), header], 0)


def header(generation: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """[LANES] float32 whose first bits are the int32 generation and step; never to be computed with."""
    tags = tf.cast(tf.stack([generation, step]), tf.int32)
    return tf.bitcast(tf.pad(tags, [[0, LANES - 2]]), tf.float32)


def header_of(flat: tf.Tensor, shard: Shard) -> tf.Tensor:
    return tf.slice(flat, [shard.header_offset], [LANES])


def tags_of(flat: tf.Tensor, shard: Shard) -> tf.Tensor:
    """[2] int32: the generation and step that a vector belongs to."""
    return tf.bitcast(header_of(flat, shard), tf.int32)[:2]


def metrics_of(flat: tf.Tensor, shard: Shard) -> tf.Tensor:
    return tf.slice(flat, [shard.metrics_offset], [LANES])


def to_flat(shard: Shard, values: Arrays, *, generation: int, step: int) -> np.ndarray:
    """[size] float32 with the parameters and state of a shard, tagged; the metrics are zero."""
    flat = np.zeros(shard.size, np.float32)
    for piece in (*shard.trainable, *shard.state):
        flat[piece.offset : piece.offset + piece.size] = np.ravel(values[piece.path])
    flat.view(np.int32)[shard.header_offset : shard.header_offset + 2] = generation, step
    return flat


def to_slot(shard: Shard, values: Arrays | None, fill: float) -> np.ndarray:
    """[trainable_size] float32: an optimizer slot, from its values by path or at its first value."""
    slot = np.full(shard.trainable_size, fill, np.float32)
    if values is not None:
        for piece in shard.trainable:
            slot[piece.offset : piece.offset + piece.size] = np.ravel(values[piece.path])
    return slot


def from_flat(pieces: Sequence[Slice], flat: np.ndarray) -> dict[str, np.ndarray]:
    """The named arrays in a flat vector or slot."""
    return {p.path: flat[p.offset : p.offset + p.size].reshape(p.shape) for p in pieces}


def _cut(flat: tf.Tensor, piece: Slice) -> tf.Tensor:
    padded = tf.slice(flat, [piece.offset], [piece.padded])  # 64-byte aligned at both ends: a view on a CPU
    return tf.reshape(padded if piece.size == piece.padded else padded[: piece.size], piece.shape)


def _pad(value: tf.Tensor, piece: Slice) -> tf.Tensor:
    flat = tf.reshape(tf.cast(value, tf.float32), [-1])
    return flat if piece.size == piece.padded else tf.pad(flat, [[0, piece.padded - piece.size]])
