"""A^n + B^n of random matrices: both powers on one device, then each on a device of its own, timed.

    python examples/matpow.py --power 10 --size 1000 --devices /cpu:0 /cpu:1

The smallest TensorFlow program with two devices. The last column shows where TensorFlow ran the matrix products. A
logical CPU gets one thread, so two of them are faster only while a second core is free.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

RUNS = 5  # timed, after a warm-up
GPU_TOLERANCE = 1e-4  # share of the largest element; two CPUs agree bit for bit
v1 = tf.compat.v1


def main(arguments: Sequence[str] | None = None) -> int:
    """Computes both ways and prints a line for each; returns 1 if sums or devices are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--power", type=int, default=10)
    parser.add_argument("--size", type=int, default=1000, help="rows of the square matrices")
    parser.add_argument("--devices", nargs=2, default=["/cpu:0", "/cpu:1"], metavar="DEVICE", help="e.g. /gpu:0 /gpu:1")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    first, second = options.devices
    if min(options.power, options.size) < 1:
        parser.error("--power and --size must be at least 1")
    missing = [device for device in options.devices if not is_here(device)]
    if missing:
        gpus = len(tf.config.list_physical_devices("GPU"))
        parser.error(f"no device {', '.join(missing)}; a device is /cpu:N, or /gpu:N with N below {gpus}")

    tf.config.experimental.enable_tensor_float_32_execution(False)  # a GPU would round every factor to three digits
    pairs = {"one device": (first, first), "two devices": (first, second)}
    sums, secs, are_placed = {}, {}, True
    for name, devices in pairs.items():
        sums[name], secs[name], products = measure(options, devices)
        shown = ", ".join(f"{matrix}: {count} on {device}" for (matrix, device), count in sorted(products.items()))
        print(f"{name:12}{secs[name]:8.4f} s   {shown}")
        expected = Counter({(m, d.lower()): options.power - 1 for m, d in zip("AB", devices, strict=True)})
        are_placed &= products == +expected
    one, two = sums.values()
    difference = float(np.max(np.abs(one - two)) / np.max(np.abs(one)))
    tolerance = GPU_TOLERANCE if any("gpu" in device.lower() for device in options.devices) else 0.0
    equal = "equal bit for bit" if difference == 0 else f"apart by {difference:.1e} of the largest element"
    print(f"two devices are {secs['one device'] / secs['two devices']:.2f} times as fast; the sums are {equal}")
    return 0 if are_placed and difference <= tolerance else 1


def is_here(device: str) -> bool:
    """Whether TensorFlow can use a device; any number of logical CPUs can be made."""
    kind, _, index = device.lower().removeprefix("/").partition(":")
    return index.isdecimal() and (
        kind == "cpu" or (kind == "gpu" and int(index) < len(tf.config.list_physical_devices("GPU")))
    )


def measure(options: argparse.Namespace, devices: Sequence[str]) -> tuple[np.ndarray, float, Counter[tuple[str, str]]]:
    """Returns the sum [size, size], the median seconds, and the products by (matrix, device)."""
    graph = build(options, devices)
    metadata, trace = v1.RunMetadata(), v1.RunOptions(output_partition_graphs=True)
    with v1.Session(graph=graph, config=session_config(devices)) as session:
        session.run(graph.get_operation_by_name("fill"))
        total = session.run("sum:0", options=trace, run_metadata=metadata)
        operation = graph.get_operation_by_name("sum")  # not its value, which stays on the device
        session.run(operation)
        secs = []
        for _ in range(RUNS):
            started = time.perf_counter()
            session.run(operation)
            secs.append(time.perf_counter() - started)
    return total, statistics.median(secs), products_by_device(metadata.partition_graphs)


def build(options: argparse.Namespace, devices: Sequence[str]) -> tf.Graph:
    """Builds the operations "fill" and "sum", and the products A/0, A/1, ..., B/0, B/1, ..."""
    with tf.Graph().as_default() as graph:
        powers, fills = [], []
        for number, (name, device) in enumerate(zip("AB", devices, strict=True)):
            with tf.device("/cpu:0"):  # draws the same numbers for every device
                # Divided by the square root of the size, so that powers neither vanish nor overflow.
                values = tf.random.stateless_normal([options.size] * 2, (options.seed, number)) / options.size**0.5
            with tf.device(device):
                matrix = v1.get_variable(name, initializer=values, use_resource=True)
                fills.append(matrix.initializer)
                factor = matrix.read_value()
                power = tf.identity(factor)
                for step in range(options.power - 1):
                    power = tf.matmul(power, factor, name=f"{name}/{step}")
            powers.append(power)
        with tf.device(devices[0]):
            tf.add(*powers, name="sum")
        tf.group(*fills, name="fill")
    return graph


def session_config(devices: Sequence[str]) -> v1.ConfigProto:
    """One thread for each device: with two, one CPU would compute both powers at once."""
    indices = {d: int(d.rpartition(":")[2]) for d in devices if "cpu" in d.lower()}
    config = v1.ConfigProto(
        device_count={"CPU": 1 + max(indices.values(), default=0)},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=len(set(devices)),
        use_per_session_threads=True,  # else both sessions would share the first one's threads
        allow_soft_placement=False,
    )
    config.gpu_options.allow_growth = True
    return config


def products_by_device(partition_graphs: Iterable[tf.compat.v1.GraphDef]) -> Counter[tuple[str, str]]:
    """Counts the matrix products in the graphs that TensorFlow's executors ran."""
    products: Counter[tuple[str, str]] = Counter()
    for node in (node for graph in partition_graphs for node in graph.node):
        matrix, _, step = node.name.partition("/")
        if matrix in ("A", "B") and step.isdigit() and "MatMul" in node.op:  # may have become a _FusedMatMul
            products[matrix, "/" + node.device.rpartition("device:")[2].lower()] += 1
    return products


if __name__ == "__main__":
    sys.exit(main())
