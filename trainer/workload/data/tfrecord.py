"""Reads a data set from TFRecord files of tf.train.Example."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.workload.data.arrays import scaling
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import ArraySpec, DataSet, Examples, Spec
from trainer.workload.data.files import find_files
from trainer.workload.data.records import AGAIN, index_records, read_at, read_in_order

if TYPE_CHECKING:
    import tensorflow as tf

ENCODINGS = {"float": "float_list", "raw": "bytes_list", "png": "bytes_list"}  # encoding -> kind of feature
KINDS = {"float32": "float_list", "int64": "int64_list", "string": "bytes_list"}  # dtype -> kind of feature
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Format:
    """The format that each record must have."""

    feature: str
    label: str
    encoding: str  # one of ENCODINGS
    shape: tuple[int, ...]
    classes: int
    features: dict[str, ArraySpec]  # by key; empty: the one feature above

    @property
    def spec(self) -> Any:
        return self.features or ArraySpec(self.shape, "float32")


def tfrecord(
    *,
    train: str,
    evaluate: str,
    classes: int,
    shape: Sequence[int] = (),
    features: Mapping[str, Mapping[str, Any]] | None = None,
    feature: str = "image",
    label: str = "label",
    encoding: str = "float",
    compression: str = "none",
    verify: bool = True,
    train_examples: int | None = None,
    evaluate_examples: int | None = None,
) -> DataSet:
    """Reads records of a feature and an int64 label.

    Args:
        train: glob of the files to train on.
        evaluate: glob of the files to evaluate on.
        classes: labels are 0..classes-1.
        shape: of one example's feature.
        features: several features, by their keys, e.g. {"age": {"dtype": "int64", "shape": []}}; in place of `feature`,
            `shape` and `encoding`.
        feature: key of the feature.
        label: key of the label.
        encoding: "float" (float_list), "raw" (uint8 bytes, scaled to 0..1) or "png" (scaled to 0..1).
        compression: only "none": compressed files have no random access.
        verify: check every record's checksum, feature and label now; otherwise only those of each file's first record.
        train_examples: expected number of records; a file that is cut off between two records looks complete.
        evaluate_examples: the same for the files to evaluate on.
    """
    layout = Format(feature, label, encoding, tuple(shape), classes, _named(features or {}))
    _check_options(layout, compression)
    to_train = _examples(train, layout, option="train", verify=verify, expected=train_examples)
    to_evaluate = _examples(evaluate, layout, option="evaluate", verify=verify, expected=evaluate_examples)
    spec = Spec(layout.spec, ArraySpec((), "int64"), None, classes)
    is_scaled = not layout.features and encoding != "float"
    scaled = functools.partial(scaling, ArraySpec(layout.shape, "uint8"), 1 / 255) if is_scaled else None
    return DataSet(to_train, to_evaluate, spec, scaled)


def _named(features: Mapping[str, Mapping[str, Any]]) -> dict[str, ArraySpec]:
    """Returns the specs of `features`."""
    named = {}
    for key, given in features.items():
        if not isinstance(given, Mapping) or not set(given) <= {"dtype", "shape"} or given.get("dtype") not in KINDS:
            raise DataError(
                f"data.options.features.{key}={given} must have a dtype, one of {', '.join(KINDS)}, and may have a "
                f"shape; e.g. data.options.features.{key}={{dtype:float32,shape:[3]}}"
            )
        named[str(key)] = ArraySpec(tuple(given.get("shape", ())), given["dtype"])
    return named


def _check_options(layout: Format, compression: str) -> None:
    if compression != "none":
        raise DataError(
            f"data.options.compression={compression}, but only uncompressed files have random access; "
            "unpack the files and type data.options.compression=none"
        )
    if layout.encoding not in ENCODINGS:
        raise DataError(f"data.options.encoding={layout.encoding} is not one of {', '.join(ENCODINGS)}")
    if min((*layout.shape, layout.classes)) < 1:
        raise DataError(
            f"data.options.shape={list(layout.shape)}, data.options.classes={layout.classes}; sizes must be at least 1"
        )
    if layout.encoding == "png" and (len(layout.shape) != 3 or layout.shape[2] not in (1, 3, 4)):
        raise DataError(
            f"data.options.shape={list(layout.shape)}, but png needs [height, width, channels] and 1, 3 or 4 channels"
        )


def _examples(pattern: str, layout: Format, *, option: str, verify: bool, expected: int | None) -> Examples:
    paths = find_files(pattern, option=f"data.options.{option}")
    indexes = [index_records(path) for path in paths]
    count = sum(len(offsets) for offsets, _ in indexes)
    if expected is not None and count != expected:
        raise DataError(
            f"{pattern}: {count} records in {len(paths)} files, but data.options.{option}_examples says {expected}; "
            f"copy the files again, or type data.options.{option}_examples={count}"
        )
    for path in paths:
        _check_records(path, layout, every=verify)
    files = np.repeat(np.arange(len(paths), dtype=np.int32), [len(offsets) for offsets, _ in indexes])
    offsets, lengths = (np.concatenate(column) for column in zip(*indexes, strict=True))
    return Examples(count, (files, offsets, lengths), _fetch(paths, layout))


def _check_records(path: Path, layout: Format, *, every: bool) -> None:
    """Reads the records of a file, or only its first, and raises DataError at the first with a problem."""
    for number, record in enumerate(read_in_order(path)):
        problem = _find_problem(record, layout)
        if problem:
            raise DataError(f"{path}, record {number}: {problem}")
        if not every:
            return


def _find_problem(record: bytes, layout: Format) -> str | None:
    """Returns the problem of a record and its remedy; None if there is none."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:
        return "is not a tf.train.Example; write the file with tf.train.Example(...).SerializeToString()"
    wanted = [(key, "features", KINDS[one.dtype]) for key, one in layout.features.items()]
    wanted = wanted or [(layout.feature, "feature", ENCODINGS[layout.encoding])]
    wanted.append((layout.label, "label", "int64_list"))
    for key, option, kind in wanted:
        if key not in features:
            return f"has no feature {key!r}, only {sorted(features)}; type data.options.{option}={_e_g(option)}"
        actual = features[key].WhichOneof("kind")
        if actual != kind:
            return f"feature {key!r} is {actual or 'empty'}, but must be {kind}; {_advice(option, actual)}"
    return _find_bad_label(features, layout) or (
        next(filter(None, (_find_bad_named(key, features[key], one) for key, one in layout.features.items())), None)
        if layout.features
        else _find_bad_value(features[layout.feature], layout)
    )


def _e_g(option: str) -> str:
    return "{NAME:{dtype:float32,shape:[]}}" if option == "features" else "NAME"


def _advice(option: str, actual: str | None) -> str:
    encodings = [encoding for encoding, kind in ENCODINGS.items() if kind == actual]
    if option == "feature" and encodings:
        return f"type data.options.encoding={' or '.join(encodings)}"
    if option == "features":
        dtypes = [dtype for dtype, kind in KINDS.items() if kind == actual]
        return f"type another dtype in data.options.features, e.g. {dtypes[0] if dtypes else 'int64'}"
    return f"type data.options.{option}=NAME of another feature, or write the files again"


def _find_bad_label(features: Any, layout: Format) -> str | None:
    labels = list(features[layout.label].int64_list.value)
    if len(labels) != 1:
        return f"feature {layout.label!r} has {len(labels)} values, but must have 1; {AGAIN}"
    if not 0 <= labels[0] < layout.classes:
        return f"label {labels[0]} is not in 0..{layout.classes - 1}; type data.options.classes=COUNT"
    return None


def _find_bad_named(key: str, feature: Any, spec: ArraySpec) -> str | None:
    values = getattr(feature, KINDS[spec.dtype]).value
    size = math.prod(size or 1 for size in spec.shape)
    if len(values) != size:
        given = f"has {len(values)} values, but shape {list(spec.shape)} has {size}"
        return f"feature {key!r} {given}; type data.options.features.{key}.shape=[...]"
    if spec.dtype == "float32" and not np.isfinite(values).all():
        return f"feature {key!r} holds NaN or infinity; remove the record, or replace the value"
    return None


def _find_bad_value(feature: Any, layout: Format) -> str | None:
    size, change = math.prod(layout.shape), "type data.options.shape=[...]"
    if layout.encoding == "float":
        values = np.array(feature.float_list.value, np.float32)
        if len(values) != size:
            given = f"has {len(values)} values, but shape {list(layout.shape)} has {size}"
            return f"feature {layout.feature!r} {given}; {change}"
        if not np.isfinite(values).all():
            return f"feature {layout.feature!r} holds NaN or infinity; remove the record, or replace the value"
        return None
    if len(feature.bytes_list.value) != 1:
        return f"feature {layout.feature!r} has {len(feature.bytes_list.value)} values, but must have 1; {AGAIN}"
    content = feature.bytes_list.value[0]
    if layout.encoding == "png":
        return _find_bad_png(content, layout)
    if len(content) != size:
        return f"feature {layout.feature!r} has {len(content)} bytes, but {list(layout.shape)} needs {size}; {change}"
    return None


def _find_bad_png(content: bytes, layout: Format) -> str | None:
    """Checks a PNG's first 24 bytes: the signature, and the header with width and height."""
    if not content.startswith(PNG_SIGNATURE) or len(content) < 24:
        return f"feature {layout.feature!r} is not a PNG image; type data.options.encoding=raw if it holds plain bytes"
    width, height = struct.unpack(">II", content[16:24])
    if (height, width) != layout.shape[:2]:
        given = [height, width, layout.shape[2]]
        return f"image is {height} x {width}, but shape is {list(layout.shape)}; type data.options.shape={given}"
    return None


def _fetch(paths: list[Path], layout: Format) -> Callable[[tf.Tensor, tuple[tf.Tensor, ...]], tuple[Any, tf.Tensor]]:
    def fetch(indices: tf.Tensor, arrays: tuple[tf.Tensor, ...]) -> tuple[Any, tf.Tensor]:
        import tensorflow as tf

        places = [tf.gather(array, indices) for array in arrays]
        records, names = tf.numpy_function(functools.partial(read_at, paths), places, [tf.string, tf.string])
        records.set_shape(indices.shape)
        names.set_shape(indices.shape)
        is_float = layout.encoding == "float"
        feature = tf.io.FixedLenFeature(layout.shape if is_float else [], tf.float32 if is_float else tf.string)
        wanted = {key: tf.io.FixedLenFeature(one.shape, one.dtype) for key, one in layout.features.items()}
        wanted = wanted or {layout.feature: feature}
        wanted |= {layout.label: tf.io.FixedLenFeature([], tf.int64)}
        parsed = tf.io.parse_example(records, wanted, example_names=names)
        if layout.features:
            return {key: parsed[key] for key in layout.features}, parsed[layout.label]
        return _decode(parsed[layout.feature], layout), parsed[layout.label]

    return fetch


def _decode(feature: tf.Tensor, layout: Format) -> tf.Tensor:
    """Returns [B, ...] of float32, from floats [B, ...], bytes [B] or images [B]."""
    import tensorflow as tf

    if layout.encoding == "float":
        return feature
    if layout.encoding == "raw":
        values = tf.reshape(tf.io.decode_raw(feature, tf.uint8), [-1, *layout.shape])
    else:
        values = tf.map_fn(
            lambda image: tf.ensure_shape(tf.io.decode_png(image, channels=layout.shape[2]), layout.shape),
            feature,
            fn_output_signature=tf.TensorSpec(layout.shape, tf.uint8),
        )
    values = tf.ensure_shape(values, [*feature.shape, *layout.shape])
    return tf.cast(values, tf.float32) * (1 / 255)
