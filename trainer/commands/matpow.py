"""`mode=matpow`: A^n + B^n of random matrices, once on one device and once on two, timed.

The smallest program with two devices: it shows that they work side by side, and where TensorFlow ran each product.
TensorFlow is imported in functions, so that the module can be imported without.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.config.schema import MatpowConfig
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError, Problem
from trainer.observe.machine import this_machine

KEY = "matpow.devices"
RUNS = 5  # timed, of each form, after one that is not
PIPE_COLUMNS = 140  # width where there is no terminal
GPU_TOLERANCE = 1e-4  # as a share of the largest element; two CPUs agree bit for bit


@dataclass(frozen=True)
class Device:
    """A device of this process, as it is typed: /cpu:0."""

    kind: str  # "cpu" or "gpu"
    index: int

    def __str__(self) -> str:
        return f"/{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """From /cpu:0, or TensorFlow's long form /job:localhost/replica:0/task:0/device:CPU:0.

        Raises:
            ValueError: if it is neither.
        """
        found = re.fullmatch(r"(?:.*/|/)?(?:device:)?(cpu|gpu):(\d{1,4})", text, re.IGNORECASE | re.ASCII)
        if not found:
            raise ValueError(f"{text!r} is not a device; a device is /cpu:N or /gpu:N")
        return cls(found[1].lower(), int(found[2]))


@dataclass(frozen=True)
class Form:
    """One way to compute the sum."""

    name: str
    a: Device  # of A's products, and of the sum
    b: Device  # of B's products


@dataclass(frozen=True)
class Measured:
    """What a form did."""

    seconds: float  # median
    ran_on: Mapping[str, Counter[str]]  # matrix products by device, of "A" and "B"
    sum_on: str


def run(config: MatpowConfig, *, seed: int) -> int:
    """Computes, compares and prints; returns the exit code.

    Raises:
        ConfigError: if there are no two such devices here.
    """
    first, second = choose(config.devices)
    wants_gpus = "gpu" in (first.kind, second.kind)
    check_there((first, second), cpus=cpus_of(this_machine().cores), gpus=count_gpus() if wants_gpus else None)
    forms = [Form("one device", first, first), Form("two devices", first, second)]
    measured, difference = measure(forms, config, seed=seed, sees_gpus=wants_gpus)
    show(config, forms, measured, difference)
    is_placed = all(ran_as_asked(form, did, config.power - 1) for form, did in zip(forms, measured, strict=True))
    return exit_codes.OK if is_placed and difference <= GPU_TOLERANCE * wants_gpus else exit_codes.INTERNAL


def choose(names: Sequence[str]) -> tuple[Device, Device]:
    """The two devices that a config names.

    Raises:
        ConfigError: if they are not two, or no devices.
    """
    example = f"e.g. {KEY}=[/cpu:0,/cpu:1] or {KEY}=[/gpu:0,/gpu:1]"
    try:
        devices = [Device.parse(name) for name in names]
    except ValueError as error:
        raise ConfigError([Problem(KEY, str(error), example)]) from None
    if len(devices) != 2 or devices[0] == devices[1]:
        message = f"[{','.join(map(str, devices))}] are not two devices: the first for A's products, the other for B's"
        raise ConfigError([Problem(KEY, message, example)])
    return devices[0], devices[1]


def cpus_of(cores: int) -> int:
    """Logical CPU devices that make sense: one a core; two on a single core, to see placement at least."""
    return max(2, cores)


def count_gpus() -> int:
    with _without_greeting():
        import tensorflow as tf
    return len(tf.config.list_physical_devices("GPU"))


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Drops what TensorFlow writes on stderr while it is imported, whatever its log level."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def check_there(devices: Sequence[Device], *, cpus: int, gpus: int | None) -> None:
    """Refuses devices that this machine does not have.

    Args:
        gpus: that TensorFlow sees; none: nobody asked.

    Raises:
        ConfigError: with what there is.
    """
    there = _range("cpu", cpus) + (f" and {_range('gpu', gpus)}" if gpus else "")
    if gpus == 0:
        there += ", and no GPU that TensorFlow sees (mode=doctor says why)"
    counts, example = {"cpu": cpus, "gpu": gpus or 0}, f"e.g. {KEY}=[/cpu:0,{'/gpu:0' if gpus else '/cpu:1'}]"
    missing = [device for device in devices if device.index >= counts[device.kind]]
    if missing:
        raise ConfigError(
            [Problem(KEY, f"{device} is not here; this machine has {there}", example) for device in missing]
        )


def _range(kind: str, count: int) -> str:
    return f"/{kind}:0" + (f" to /{kind}:{count - 1}" if count > 1 else "")


def measure(forms: Sequence[Form], config: MatpowConfig, *, seed: int, sees_gpus: bool) -> tuple[list[Measured], float]:
    """Runs the two forms turn by turn, so that a noisy moment falls on both.

    Returns:
        What each form did, and how far their sums are apart: the largest difference, as a share of the largest element.
    """
    import numpy as np

    with _without_greeting():
        import tensorflow as tf
    tf.config.experimental.enable_tensor_float_32_execution(False)  # a GPU would round every factor to three digits
    sessions = [_Session(form, config, seed=seed, sees_gpus=sees_gpus) for form in forms]
    one, two = (session.warm_up() for session in sessions)
    for _ in range(RUNS):
        for session in sessions:
            session.time()
    return [session.end() for session in sessions], float(np.max(np.abs(one - two)) / np.max(np.abs(one)))


class _Session:
    """One form, in a graph and a session of its own."""

    def __init__(self, form: Form, config: MatpowConfig, *, seed: int, sees_gpus: bool) -> None:
        import tensorflow as tf

        self._seconds: list[float] = []
        self._graph = build(form, config, seed=seed)
        self._session = tf.compat.v1.Session(graph=self._graph, config=_session_config(form, sees_gpus))
        self._session.run(self._graph.get_operation_by_name("fill"))

    def warm_up(self) -> Any:
        """Runs it once, notes what ran where, and returns the sum [size, size]."""
        import tensorflow as tf

        told, options = tf.compat.v1.RunMetadata(), tf.compat.v1.RunOptions(output_partition_graphs=True)
        total = self._session.run("sum:0", options=options, run_metadata=told)
        self._executed = list(told.partition_graphs)
        self._session.run(self._graph.get_operation_by_name("sum"))  # as it will be timed; it is compiled anew
        return total

    def time(self) -> None:
        started = time.perf_counter()
        self._session.run(self._graph.get_operation_by_name("sum"))  # the operation: its value stays on the device
        self._seconds.append(time.perf_counter() - started)

    def end(self) -> Measured:
        self._session.close()
        return Measured(
            statistics.median(self._seconds), products_by_device(self._executed), device_of_sum(self._executed)
        )


def build(form: Form, config: MatpowConfig, *, seed: int) -> Any:
    """A graph with operations "fill" and "sum", and the products A/0, A/1, ..., B/0, B/1, ...

    The matrices are variables on their devices, so that a run moves no more than B^n to where the sum is made.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        powers, fills = [], []
        for number, (name, device) in enumerate({"A": form.a, "B": form.b}.items()):
            shape = (config.size, config.size)
            with v1.device("/cpu:0"):  # where both forms draw the same numbers
                # Divided by the square root of the size, so that powers neither vanish nor overflow.
                drawn = tf.random.stateless_normal(shape, (seed, number)) / config.size**0.5
            with v1.device(str(device)):
                matrix = v1.get_variable(name, initializer=drawn, use_resource=True)
                fills.append(matrix.initializer)
                read = matrix.read_value()
                power = tf.identity(read, name=f"{name}/first")
                for step in range(config.power - 1):
                    power = tf.matmul(power, read, name=f"{name}/{step}")
            powers.append(power)
        with v1.device(str(form.a)):
            tf.add(*powers, name="sum")
        tf.group(*fills, name="fill")
    return graph


def _session_config(form: Form, sees_gpus: bool) -> Any:
    """One thread a device: a logical CPU is no core, and with two threads one CPU would compute both powers at once.

    For GPUs the threads only start the products.
    """
    import tensorflow as tf

    devices = {form.a, form.b}
    cpus = 1 + max((device.index for device in devices if device.kind == "cpu"), default=0)
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": cpus} if sees_gpus else {"CPU": cpus, "GPU": 0},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=len(devices),
        use_per_session_threads=True,  # else the first session's threads would be those of the second
        allow_soft_placement=False,
    )
    config.gpu_options.allow_growth = True
    return config


def products_by_device(partition_graphs: Sequence[Any]) -> dict[str, Counter[str]]:
    """Matrix products of "A" and "B" by device, in the graphs that TensorFlow handed to its executors."""
    ran: dict[str, Counter[str]] = {"A": Counter(), "B": Counter()}
    for node in (node for graph in partition_graphs for node in graph.node):
        matrix, _, step = node.name.partition("/")
        if matrix in ran and step.isdigit() and "MatMul" in node.op:  # the optimizer may have made it a _FusedMatMul
            ran[matrix][str(Device.parse(node.device))] += 1
    return ran


def device_of_sum(partition_graphs: Sequence[Any]) -> str:
    return next(str(Device.parse(n.device)) for graph in partition_graphs for n in graph.node if n.name == "sum")


def ran_as_asked(form: Form, measured: Measured, products: int) -> bool:
    """Whether every product, and the sum, ran on the device of its form."""
    asked = {"A": +Counter({str(form.a): products}), "B": +Counter({str(form.b): products})}
    return measured.ran_on == asked and measured.sum_on == str(form.a)


def show(config: MatpowConfig, forms: Sequence[Form], measured: Sequence[Measured], difference: float) -> None:
    """Prints a row for each form, then how they compare."""
    n, size = config.power, config.size
    table = Table()
    for column in ("", "products of A", "products of B", "sum"):
        table.add_column(column)
    table.add_column("seconds", justify="right")
    for form, did in zip(forms, measured, strict=True):
        a, b = _describe(did.ran_on["A"]), _describe(did.ran_on["B"])
        table.add_row(form.name, a, b, did.sum_on, f"{did.seconds:.4f}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(f"[bold]A^{n} + B^{n}[/bold], {size} x {size}, float32, median of {RUNS} runs after a warm-up")
    console.print(table)
    equal = "equal bit for bit" if difference == 0 else f"apart by {difference:.1e} of the largest element"
    console.print(
        f"two devices are {measured[0].seconds / measured[1].seconds:.2f} times as fast; the sums are {equal}"
    )
    for form, did in zip(forms, measured, strict=True):
        if not ran_as_asked(form, did, n - 1):
            console.print(f"problem: {form.name}: not everything ran where it was put, {form.a} and {form.b}")


def _describe(ran_on: Counter[str]) -> str:
    return ", ".join(f"{count} on {device}" for device, count in sorted(ran_on.items())) or "none"
