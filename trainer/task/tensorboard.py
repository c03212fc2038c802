"""Writes TensorBoard events as TFRecords of Event protocol buffers.

`tf.summary` needs the tensorboard package to write, which TensorFlow no longer installs.
"""

import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

HISTOGRAM_BINS = 30
# What TensorFlow inserts in the names of a function's operations when it inlines it, by the attribute that names it.
INLINED = {"f": "", "body": "body/", "cond": "cond/", "then_branch": "then/", "else_branch": "else/"}


class Events:
    """One event file in a folder."""

    def __init__(self, folder: Path, *, start: int) -> None:
        """Opens a new file; TensorBoard then ignores steps after `start` in older files."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}"
        self._writer = tf.io.TFRecordWriter(str(folder / name))
        self._write(v1.Event(file_version="brain.Event:2"))
        self._write(v1.Event(step=start + 1, session_log=v1.SessionLog(status=v1.SessionLog.START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write(_summary(step, [v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes the distribution of the finite values, where there are any."""
        finite = {tag: v[np.isfinite(v)].astype(np.float64) for tag, v in values.items()}
        shown = [v1.Summary.Value(tag=tag, histo=_histogram(v)) for tag, v in finite.items() if v.size]
        self._write(_summary(step, shown))

    def counts(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes histograms of counts: how often 0, 1, 2, ... occurred."""
        shown = [v1.Summary.Value(tag=tag, histo=_counted(v)) for tag, v in values.items() if v.any()]
        self._write(_summary(step, shown))

    def graph(self, graph: Any, devices: Mapping[str, str] | None = None) -> None:
        """Writes a graph.

        Args:
            devices: where each operation ran, by its name with those of its callers; instead of where it was asked for.
        """
        definition = graph.as_graph_def(add_shapes=True)
        if devices is not None:
            _set_devices(definition, devices)
        self._write(v1.Event(graph_def=definition.SerializeToString()))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


def _summary(step: int, values: list[Any]) -> Any:
    return v1.Event(step=step, summary=v1.Summary(value=values))


def _set_devices(graph: Any, devices: Mapping[str, str]) -> None:
    """Sets the device that each node ran on; none for one that was optimized away or ran on several devices."""
    functions = {f.signature.name: f for f in graph.library.function}
    device_of = {re.sub(r"/(body|cond|then|else)/_\d+/", r"/\1/", name): device for name, device in devices.items()}
    ran: dict[tuple[str, str], set[str]] = {}  # by (function, node); a function has several callers

    def visit(function: str, nodes: Any, caller: str, above: tuple[str, ...]) -> None:
        for node in nodes:
            name = caller + node.name
            if name in device_of:
                ran.setdefault((function, node.name), set()).add(device_of[name])
            for attribute, below in INLINED.items():
                called = node.attr[attribute].func.name if attribute in node.attr else ""
                if called in functions and called not in above:
                    visit(called, functions[called].node_def, f"{name}/{below}", (*above, called))

    visit("", graph.node, "", ())
    for function, nodes in [("", graph.node), *((name, f.node_def) for name, f in functions.items())]:
        for node in nodes:
            ran_on = ran.get((function, node.name), set())
            node.device = ran_on.pop() if len(ran_on) == 1 else ""


def _histogram(values: np.ndarray) -> Any:
    """Returns the histogram of float64 values: 30 edges do not fit between neighbouring values of float32."""
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


def _counted(counts: np.ndarray) -> Any:
    nonzero = np.flatnonzero(counts)
    numbers = np.arange(len(counts), dtype=np.float64)
    return v1.HistogramProto(
        min=nonzero[0],
        max=nonzero[-1],
        num=counts.sum(),
        sum=(counts * numbers).sum(),
        sum_squares=(counts * np.square(numbers)).sum(),
        bucket_limit=(numbers + 0.5).tolist(),
        bucket=counts.tolist(),
    )
