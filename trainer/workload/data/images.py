"""Reads images in folders, one folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from trainer.workload.data.arrays import scaling
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import ArraySpec, Batch, DataSet, Examples, Spec
from trainer.workload.data.files import check_folder
from trainer.workload.data.parts import SHARE, divide, is_fraction

if TYPE_CHECKING:
    import tensorflow as tf

SIGNATURES = {
    ".jpg": b"\xff\xd8\xff",
    ".jpeg": b"\xff\xd8\xff",
    ".png": b"\x89PNG\r\n\x1a\n",
    ".bmp": b"BM",
    ".gif": b"GIF8",
}
CHANNELS = (1, 3, 4)


def images(
    *,
    path: str,
    size: Sequence[int],
    evaluate: str | float | None = None,
    channels: int = 3,
    scale: float | None = None,
    verify: bool = False,
) -> DataSet:
    """Reads folders of images, decoded batch by batch; the sorted names of the folders are the classes.

    Args:
        path: the folder that holds the folders.
        size: [height, width] that images are resized to, bilinearly.
        evaluate: another such folder with the same classes, or the share of the examples; None: 0.2.
        channels: 1, 3 or 4.
        scale: factor of the pixels, which are float32 in 0..255 without it.
        verify: decode every image now; otherwise only the first bytes of each file are checked.
    """
    height_width = tuple(size)
    if len(height_width) != 2 or min(height_width) < 1 or channels not in CHANNELS:
        raise DataError(
            f"data.options.size={list(size)} data.options.channels={channels}; size is [height, width], and channels "
            f"one of {', '.join(map(str, CHANNELS))}"
        )
    shape = (*height_width, channels)
    evaluate = SHARE if evaluate is None else evaluate
    paths, labels, names = _find(path, "data.options.path")
    if is_fraction(evaluate):
        parts = [(paths[rows], labels[rows]) for rows in divide(len(paths), float(evaluate), path)]
    else:
        other_paths, other_labels, other_names = _find(str(evaluate), "data.options.evaluate")
        if other_names != names:
            raise DataError(
                f"{evaluate}: has classes {_listed(other_names)}, but {path} has {_listed(names)}; the folders in both "
                "must have the same names"
            )
        parts = [(paths, labels), (other_paths, other_labels)]
    if verify:
        for found, _ in parts:
            _decode_all(found, channels)
    train, test = (_examples(*part, shape, scale) for part in parts)
    spec = Spec(ArraySpec(shape, "float32"), ArraySpec((), "int64"), None, len(names))
    scaled = None if scale is None else partial(scaling, spec.features, scale)
    return DataSet(train, test, spec, scaled, tuple(names))


def _find(path: str, option: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns the paths [N] and labels [N] of the images in a folder, and the names of the classes."""
    folder = check_folder(path, option=option)
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not names:
        raise DataError(f"{folder}: has no folders; it must have one for each class, with its images")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        own = sorted(str(file) for file in (folder / name).rglob("*") if file.suffix.lower() in SIGNATURES)
        if not own:
            raise DataError(
                f"{folder / name}: has no image; {', '.join(SIGNATURES)} are read. Remove the folder if empty"
            )
        files += own
        labels += [label] * len(own)
    for file in files:
        _check_signature(file)
    return np.array(files, object), np.array(labels), names


def _check_signature(file: str) -> None:
    with open(file, "rb") as content:
        first = content.read(8)
    if not any(first.startswith(signature) for signature in SIGNATURES.values()):
        kind = "is empty (0 bytes)" if not first else f"is not an image: it starts with {first.hex(' ')}"
        raise DataError(f"{file}: {kind}; copy it again, or remove it")


def _decode_all(files: np.ndarray, channels: int) -> None:
    import tensorflow as tf

    for file in files:
        try:
            tf.io.decode_image(tf.io.read_file(file), channels, expand_animations=False)
        except tf.errors.InvalidArgumentError as error:
            raise DataError(f"{file}: cannot be decoded ({error.message}); copy it again, or remove it") from error


def _examples(files: np.ndarray, labels: np.ndarray, shape: tuple[int, ...], scale: float | None) -> Examples:
    def decode(file: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        image = tf.io.decode_image(tf.io.read_file(file), shape[2], expand_animations=False)
        resized = tf.image.resize(image, shape[:2])
        return tf.ensure_shape(resized if scale is None else resized * scale, shape)

    def fetch(indices: tf.Tensor, arrays: tuple[tf.Tensor, ...]) -> Batch:
        import tensorflow as tf

        chosen, classes = (tf.gather(array, indices) for array in arrays)
        spec = tf.TensorSpec(shape, tf.float32)
        decoded = tf.map_fn(decode, chosen, fn_output_signature=spec, parallel_iterations=1)
        return Batch(tf.ensure_shape(decoded, [indices.shape[0], *shape]), classes)

    return Examples(len(files), (files, labels), fetch)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
