"""TensorBoard events, written as what they are: TFRecords of Event protocol buffers.

`tf.summary` needs the tensorboard package to write, which TensorFlow does not install any more; reading needs it only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

HISTOGRAM_BINS = 30


class Events:
    """One event file in a folder."""

    def __init__(self, folder: Path, *, start: int) -> None:
        """Opens a new file; what older files say of steps after `start` is taken back."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}"
        self._writer = tf.io.TFRecordWriter(str(folder / name))
        self._write(v1.Event(file_version="brain.Event:2"))
        self._write(v1.Event(step=start + 1, session_log=v1.SessionLog(status=v1.SessionLog.START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write(_summary(step, [v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes how the finite values are spread; where none is, there is nothing to show."""
        finite = {tag: v[np.isfinite(v)].astype(np.float64) for tag, v in values.items()}
        shown = [v1.Summary.Value(tag=tag, histo=_histogram(v)) for tag, v in finite.items() if v.size]
        self._write(_summary(step, shown))

    def graph(self, graph: Any) -> None:
        self._write(v1.Event(graph_def=graph.as_graph_def(add_shapes=True).SerializeToString()))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


def _summary(step: int, values: list[Any]) -> Any:
    return v1.Event(step=step, summary=v1.Summary(value=values))


def _histogram(values: np.ndarray) -> Any:
    """Of float64, because 30 edges do not fit between neighbouring values of float32."""
    counts, edges = np.histogram(values, bins=HISTOGRAM_BINS)
    return v1.HistogramProto(
        min=values.min(),
        max=values.max(),
        num=values.size,
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
