"""Finds files that a tf.data pipeline writes as it is read; two processes must not write them at the same time."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.workload.data.errors import DataError
from trainer.workload.patches import patched

COMPLETE = ".index"  # suffix of a file that exists only if the cache is complete
LOCK = "_0.lockfile"  # suffix of a file that exists while the cache is written


@contextmanager
def noted() -> Iterator[list[str]]:
    """Records the files of pipelines made in this context, e.g. `cache(FILENAME)`; caches stay in memory.

    A process that reads only the first examples would leave a cache that others take for one being written.
    """
    files: list[str] = []
    dataset = tf.data.Dataset
    original = dataset.cache

    @functools.wraps(original)
    def cache(self: Any, filename: Any = "", *args: Any, **options: Any) -> Any:
        file = os.fspath(filename) if isinstance(filename, str | os.PathLike) else ""
        if file and Path(file + LOCK).exists():
            raise DataError(
                f"cache({file!r}): {file}{LOCK} shows that another process is writing it; wait until it is done, or "
                f"remove {file}_0* if it was killed"
            )
        if file and not Path(file + COMPLETE).exists():
            files.append(f"cache({file!r})")
            filename = ""
        return original(self, filename, *args, **options)

    others = ((dataset, name, _noting(files, getattr(dataset, name))) for name in ("snapshot", "save"))
    with patched((dataset, "cache", cache), *others):
        yield files


def _noting(files: list[str], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, path: Any, *args: Any, **options: Any) -> Any:
        files.append(f"{method.__name__}({str(path)!r})")
        return method(self, path, *args, **options)

    return call
