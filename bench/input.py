"""Measures the share of a step that waits for data, for each shipped data set with its usual model, in one process.

    python -m bench.input [--quick]

writes bench/results/input.md. What is counted is what a run shows of itself: from the begin of a step until its batch
is there. That has the way into TensorFlow in it, so the first row is a data set of four numbers an example: what the
others wait beyond that, they wait for data. Data sets that are downloaded are stood in for by random images of their
sizes, and files are written for those that need some.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.facts import RESULTS, of_machine
from bench.steady import RunError, steady_run
from trainer.workload.data import Examples
from trainer.workload.data.idx import mnist_10k

BATCH, WARM_STEPS, SAMPLES, SAMPLE_EVERY_SECS = 128, 25, 8, 1.0
WISHED = 0.02
ENCODINGS = ("float", "raw", "png")  # of TFRecord files


class Case(NamedTuple):
    name: str
    model: str
    overrides: list[str]


class WaitShare(NamedTuple):
    """The waiting share of one case."""

    case: Case
    step_ms: float
    waits: tuple[float, ...]  # share of the 20 steps before each look

    @property
    def wait_ms(self) -> float:
        return self.step_ms * statistics.median(self.waits)

    def for_data(self, least_ms: float) -> float:
        """Returns the share of a step that waits for data.

        Args:
            least_ms: that a step waits where data costs nothing.
        """
        return max(0.0, self.wait_ms - least_ms) / self.step_ms


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="two looks at each, only printed")
    quick = arguments.parse_args().quick
    samples = 2 if quick else SAMPLES
    shares, left_out = [], []
    before = of_machine()
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as directory:
        for case in cases(Path(directory)):
            try:
                shares.append(measure(case, samples))
            except RunError as error:
                left_out.append(f"{case.name} is left out: {error}")
                print(left_out[-1], file=sys.stderr)
            else:
                print(line(shares[-1], shares[0].wait_ms), file=sys.stderr)
    where = f"{before['cpu']}, {before['cores']} cores, TensorFlow {before['tensorflow']}, {before['date']}"
    text = page(where, shares, left_out)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "input.md").write_text(text)
    print(text)
    return 0


def cases(directory: Path) -> Iterator[Case]:
    """Yields the data sets that are shipped, made or downloaded, npz and TFRecord; writes the files that they need."""
    yield Case("four numbers", "mlp", ["data=synthetic", "data.options.shape=[4]", "model.options.depth=0"])
    yield Case("mnist_10k", "cnn", ["data=mnist_10k"])
    yield Case("mnist_10k", "mlp", ["data=mnist_10k"])
    yield Case("synthetic", "cnn", ["data=synthetic"])
    yield Case("clicks", "ctr", ["model=ctr", "data=clicks"])
    for name, count, shape, model in (
        ("mnist", 60_000, (28, 28), "cnn"),
        ("fashion_mnist", 60_000, (28, 28), "cnn"),
        ("cifar10", 50_000, (32, 32, 3), "resnet20"),
        ("npz", 20_000, (28, 28, 1), "cnn"),
    ):
        path = directory / f"{name}.npz"
        write_npz(path, count, shape)
        scale = ["data.options.scale=0.00392157"] if name == "npz" else []  # others scale by themselves
        yield Case(name, model, [f"data={name}", f"data.options.path={path}", *scale])
        path.unlink()
    for encoding in ENCODINGS:
        paths = {part: directory / f"{part}-{encoding}.tfrecord" for part in ("train", "evaluate")}
        write_records(paths["train"], paths["evaluate"], encoding)
        files = [f"data.options.{part}={path}" for part, path in paths.items()]
        yield Case(f"tfrecord, {encoding}", "cnn", ["data=tfrecord", f"data.options.encoding={encoding}", *files])


def measure(case: Case, samples: int) -> WaitShare:
    """Looks at a run several times.

    Raises:
        RunError: if it does not come to train.
    """
    with steady_run([*case.overrides, f"model={case.model}", f"train.batch_size={BATCH}"]) as run:
        run.wait_for_step(WARM_STEPS)
        waits, steps, began = [], 0, time.monotonic()
        for _ in range(samples):
            sample = run.measure(SAMPLE_EVERY_SECS)
            waits.append(sample.wait_secs / sample.secs)
            steps += sample.steps
        return WaitShare(case, 1000 * (time.monotonic() - began) / max(1, steps), tuple(waits))


def line(share: WaitShare, least_ms: float) -> str:
    waits = f"{share.wait_ms:.2f} | {100 * min(share.waits):.1f} to {100 * max(share.waits):.1f} %"
    for_data = f"{100 * share.for_data(least_ms):.1f} %"
    return f"| {share.case.name} | {share.case.model} | {share.step_ms:.1f} | {waits} | {for_data} |"


def page(where: str, shares: Sequence[WaitShare], left_out: Sequence[str]) -> str:
    """Returns the table, as Markdown; the first of the shares is the one that has nothing to wait for."""
    least = shares[0].wait_ms if shares else 0.0
    above = [f"{share.case.name} with {share.case.model}" for share in shares if share.for_data(least) >= WISHED]
    lines = [
        "# What share of a step waits for data",
        "",
        f"{where}. One process, {BATCH} examples a step; waits are medians of looks at 20 steps each, with the lowest "
        "and the highest share. For data: what is waited beyond the first row, where nothing has to be made.",
        "",
        "| data set | model | ms per step | ms waited | lowest to highest | for data |",
        "|---|---|---|---|---|---|",
        *(line(share, least) for share in shares),
        "",
        f"At least {WISHED:.0%} of a step, which misses the target: {', '.join(above)}."
        if above
        else f"All are below {WISHED:.0%}, as wished.",
        *left_out,
    ]
    return "\n".join(lines) + "\n"


def write_npz(path: Path, count: int, shape: Sequence[int]) -> None:
    """Writes random images, and labels of 10 classes."""
    random = np.random.default_rng(0)

    def images(size: int) -> np.ndarray:
        return random.integers(0, 256, (size, *shape), np.uint8)

    def labels(size: int) -> np.ndarray:
        return random.integers(0, 10, size)

    test = min(count, 1000)
    np.savez(path, x_train=images(count), y_train=labels(count), x_test=images(test), y_test=labels(test))


def write_records(train: Path, evaluate: Path, encoding: str) -> None:
    """Writes the shipped digits as TFRecord files."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    import tensorflow as tf  # only here: it takes seconds

    data = mnist_10k()
    for path, examples in ((train, data.train), (evaluate, data.evaluate)):
        assert isinstance(examples, Examples)
        images, labels = examples.arrays[:2]
        with tf.io.TFRecordWriter(str(path)) as file:
            for image, label in zip(images, labels, strict=True):
                if encoding == "float":
                    values = np.asarray(image, np.float32).ravel() / (255 if image.dtype == np.uint8 else 1)
                    feature = tf.train.Feature(float_list=tf.train.FloatList(value=values))
                else:
                    pixels = np.asarray(image) if image.dtype == np.uint8 else np.uint8(np.round(255 * image))
                    raw = pixels.tobytes() if encoding == "raw" else tf.io.encode_png(pixels).numpy()
                    feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[raw]))
                labelled = {"image": feature, "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
                file.write(tf.train.Example(features=tf.train.Features(feature=labelled)).SerializeToString())


if __name__ == "__main__":
    sys.exit(main())
