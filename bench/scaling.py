"""What `mode=plan` expects of clusters that others have published measurements of, and of up to 4,096 workers.

    python -m bench.scaling

writes bench/results/scaling.md. Nothing trains: a model of as many parameters is planned, with the published speed of
one GPU, and its step is forecast for machines and links like those of the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer.config.compose import load
from trainer.config.schema import RunConfig
from trainer.launch.describe import describe
from trainer.observe.machine import this_machine
from trainer.plan.description import Description, Question
from trainer.plan.devices import Machine
from trainer.plan.forecast import step_time
from trainer.plan.forecast.step_time import Parts, Workload
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan

RESULTS = Path(__file__).parent / "results" / "scaling.md"
GPUS, CORES = 8, 32  # of a p2.8xlarge
IMAGENET = 1_281_167  # examples
INPUTS = 1000  # of the model that stands for another: a dense layer with as many parameters


class Published(NamedTuple):
    """A model on Amazon EC2 p2.8xlarge (8 K80, 10 Gbit/s), synchronous, with a ps on every machine."""

    name: str
    parameters: float  # millions
    batch: int  # of a GPU
    rates: dict[int, float]  # examples/s by number of GPUs


# TensorFlow's tf_cnn_benchmarks of May 2017, from tensorflow/docs, site/en/r1/guide/performance/benchmarks.md. The last
# rows of InceptionV3 and ResNet-152 had 6 and 4 ps.
PUBLISHED = (
    Published("InceptionV3", 23.8, 64, {1: 29.7, 8: 229, 16: 459, 32: 902, 64: 1783}),
    Published("ResNet-50", 25.6, 64, {1: 52.4, 8: 378, 16: 751, 32: 1388, 64: 2744}),
    Published("ResNet-152", 60.2, 32, {1: 19.4, 8: 146, 16: 291, 32: 565, 64: 981}),
)
# Poseidon, arXiv 1706.03292: 32 machines with one Titan X each, 40GbE, batch 32. The speed of one is not given: that of
# a K80 and of a P100 (the table above, and the same page for a DGX-1) lie on either side of it.
POSEIDON = Published("Inception-V3", 27, 32, {1: 29.2, 32: 0})
FASTER = 128.0  # examples/s of a P100 at that batch
GROWTH, LINKS = (8, 64, 512, 4096), (10.0, 100.0)  # workers of one GPU each; Gbit/s
WORKERS_OF_PS = (8, 32, 128)  # of one ps


class Size(NamedTuple):
    """A cluster of like machines."""

    machines: int
    ps: int
    gpus: int = 1  # of each worker; one worker on a machine
    link_gbps: float = 10.0


def main() -> None:
    """Writes and prints the tables."""
    text = "\n".join([*_lines()])
    RESULTS.write_text(text + "\n")
    print(text)


def _lines() -> Iterator[str]:
    yield "# Forecasts beside published measurements"
    yield ""
    yield "| model | GPUs | cluster | measured examples/s | forecast | forecast/measured |"
    yield "|---|---|---|---|---|---|"
    for one in PUBLISHED:
        description = _describe(one.parameters)
        for gpus, measured in [*one.rates.items()][1:]:
            size = Size(gpus // GPUS, gpus // GPUS, gpus=GPUS)
            parts = _plan_and_parts(description, one.batch, one.rates[1], size)[1]
            rate = one.batch * gpus / parts.total
            name = f"{size.ps}ps{size.machines}w"
            yield f"| {one.name} | {gpus} | `{name}` | {measured:,} | {rate:,.0f} | {rate / measured:.2f} |"
    yield ""
    yield "| model | GPUs, Gbit/s | one GPU, examples/s | forecast speed-up |"
    yield "|---|---|---|---|"
    description = _describe(POSEIDON.parameters)
    for rate in (POSEIDON.rates[1], FASTER):
        parts = _plan_and_parts(description, POSEIDON.batch, rate, Size(32, 32, link_gbps=40))[1]
        speed_up = 32 * POSEIDON.batch / parts.total / rate
        yield f"| {POSEIDON.name}, batch {POSEIDON.batch} | 32, 40 | {rate:g} | {speed_up:.1f} |"
    yield ""
    yield "# Forecasts for ResNet-50 as workers are added"
    yield ""
    yield "| workers | ps | Gbit/s | step ms | compute | wire | update | efficiency | planned in s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    resnet = PUBLISHED[1]
    description = _describe(resnet.parameters)
    for workers in GROWTH:
        for ps in sorted({max(1, workers // each) for each in WORKERS_OF_PS}):
            for gbps in LINKS:
                size = Size(workers, ps, link_gbps=gbps)
                began = time.perf_counter()
                _, parts = _plan_and_parts(description, resnet.batch, resnet.rates[1], size)
                took = time.perf_counter() - began
                ms = [f"{1000 * secs:,.0f}" for secs in (parts.total, parts.compute, parts.wire, parts.update)]
                cells = [f"{workers:,}", f"{size.ps:,}", f"{gbps:g}", *ms, f"{parts.compute / parts.total:.0%}"]
                yield f"| {' | '.join([*cells, f'{took:.1f}'])} |"


def _describe(parameters: float) -> Description:
    """A model with so many millions of parameters."""
    config = _config(parameters, "cluster=local")
    described = describe(Question.about(config.model, config.data, user=None, seed=config.seed))
    return replace(described, train_examples=IMAGENET)


def _config(parameters: float, *overrides: str) -> RunConfig:
    width = round(parameters * 1e6 / INPUTS)
    model = ["model=mlp", f"model.options={{depth:1,width:{width}}}"]
    data = ["data=synthetic", f"data.options.shape=[{INPUTS}]"]
    return load([*model, *data, "optimizer=sgd", *overrides], lambda config: [])


def _plan_and_parts(description: Description, batch: int, rate: float, size: Size) -> tuple[Plan, Parts]:
    """The plan of a cluster with a worker, and perhaps a ps, on each machine, and the seconds of a step.

    Args:
        batch: examples of one GPU.
        rate: examples/s of one GPU.
    """
    config = _config(1, f"cluster={size.ps}ps{size.machines}w")
    names = [f"m{number}" for number in range(size.machines)]
    config.cluster.addresses = {
        "worker": [f"{name}:2222" for name in names],
        "ps": [f"{name}:2223" for name in names[: size.ps]],
    }
    config.device.gpus = {"worker": list(range(size.gpus))}
    config.device.replicas = [f"/gpu:{number}" for number in range(size.gpus)]
    config.train.batch_size = batch * size.gpus * size.machines
    config.plan.example_ms, config.plan.link_gbps = 1000 / rate, size.link_gbps
    machine: Machine = replace(this_machine(), cores=CORES)
    plan = make_plan(config, description, machine)
    workload = Workload.of(description, config.optimizer, config.plan, cores=CORES)
    return plan, step_time.parts_of(plan, workload)


if __name__ == "__main__":
    main()
