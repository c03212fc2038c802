"""What a finished run exports: its parameters by name, and the model as plain Keras loads it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from trainer.engine.snapshot import Snapshot
from trainer.evaluation import evaluated


def params_sha256(snapshot: Snapshot) -> str:
    """SHA-256 over the little-endian float32 bytes of all parameters and state, in the order of their paths."""
    digest = hashlib.sha256()
    for _, value in sorted((snapshot.parameters | snapshot.state).items()):
        digest.update(np.ascontiguousarray(value, "<f4").tobytes())
    return digest.hexdigest()


def export(snapshot: Snapshot, model: Any, folder: Path) -> None:
    """Writes params.npz (each parameter under its path) and model.keras (averaged parameters, where there are any)."""
    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, Any] = dict(sorted((snapshot.parameters | snapshot.state).items()))
    np.savez(folder / "params.npz", **named)
    values = evaluated(snapshot) | snapshot.state
    for variable in model.variables:
        if variable.path in values:
            variable.assign(values[variable.path])
    model.save(folder / "model.keras")
