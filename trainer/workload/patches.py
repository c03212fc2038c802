"""Replaces functions of Keras and TensorFlow temporarily; no other module does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

Patch = tuple[Any, str, Any]  # owner: a class, a module or an object; the name of its attribute; what takes its place

_ABSENT = object()


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Sets attributes inside the context, and restores them afterwards, inherited ones too."""
    before = [vars(owner).get(name, _ABSENT) for owner, name, _ in patches]
    for owner, name, new in patches:
        _set(owner, name, new)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(patches, before, strict=True):
            _set(owner, name, old)


def _set(owner: Any, name: str, value: Any) -> None:
    plain = isinstance(owner, keras.Layer)  # whose own __setattr__ would track what it is given
    if value is _ABSENT:
        object.__delattr__(owner, name) if plain else delattr(owner, name)
    elif plain:
        object.__setattr__(owner, name, value)
    else:
        setattr(owner, name, value)
