"""Reads data sets that Keras downloads, unless a local file is given."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from trainer.plan.downloads import keras_home, mark_of
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError, MissingInputError
from trainer.workload.data.examples import DataSet
from trainer.workload.data.npz import KEYS, read_npz

CLASSES = 10  # of each of these sets


def mnist(*, path: str | None = None) -> DataSet:
    """Reads handwritten digits: 60,000 to train on, 10,000 to evaluate on, [28, 28, 1]."""
    return _images("mnist", path, (28, 28, 1))


def fashion_mnist(*, path: str | None = None) -> DataSet:
    """Reads pieces of clothing: 60,000 to train on, 10,000 to evaluate on, [28, 28, 1]."""
    return _images("fashion_mnist", path, (28, 28, 1))


def cifar10(*, path: str | None = None) -> DataSet:
    """Reads small photographs: 50,000 to train on, 10,000 to evaluate on, [32, 32, 3]."""
    return _images("cifar10", path, (32, 32, 3))


def _images(name: str, path: str | None, shape: tuple[int, ...]) -> DataSet:
    x_train, y_train, x_test, y_test = read_npz(path)[:4] if path else _download(name)
    source = str(path or name)
    train, test = (_with_channels(x, shape, source) for x in (x_train, x_test))
    return from_arrays((train, y_train), (test, y_test), source=source, scale=1 / 255, classes=CLASSES)


def _with_channels(images: np.ndarray, shape: tuple[int, ...], source: str) -> np.ndarray:
    """Returns [N, H, W] or [N, H, W, C] -> [N, H, W, C]; grey images are often stored without the channel."""
    if images.ndim == len(shape) and shape[-1] == 1:
        images = images[..., None]
    if images.shape[1:] != shape:
        raise DataError(
            f"{source}: images are {list(images.shape[1:])}, but must be {list(shape)}; "
            "for other shapes type data=npz data.options.path=FILE"
        )
    return images


def _download(name: str) -> tuple[np.ndarray, ...]:
    import keras

    try:
        with _alone():
            (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
            mark_of(name).parent.mkdir(exist_ok=True)
            mark_of(name).touch()
    except Exception as error:  # Keras raises a bare Exception when it cannot download
        raise MissingInputError(
            f"{name}: Keras cannot load it ({error}); without a network, put an .npz file with {', '.join(KEYS)} "
            f"on this machine, e.g. /data/{name}.npz, and type data.options.path=/data/{name}.npz"
        ) from error
    return x_train, y_train, x_test, y_test


@contextmanager
def _alone() -> Iterator[None]:
    """Lets one process at a time download, because others would read the file that Keras is writing."""
    folder = keras_home()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "download.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield
