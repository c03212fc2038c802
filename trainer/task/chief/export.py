"""Exports a finished run: its parameters by name, and the model as plain Keras loads it."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from trainer.engine.vectors.snapshot import Snapshot
from trainer.task.evaluator.score import evaluated
from trainer.workload import loss_scale


def params_sha256(snapshot: Snapshot) -> str:
    """SHA-256 over the little-endian float32 bytes of all parameters and state, in the order of their paths."""
    digest = hashlib.sha256()
    for _, value in sorted(_of_model(snapshot).items()):
        digest.update(np.ascontiguousarray(value, "<f4").tobytes())
    return digest.hexdigest()


def export(snapshot: Snapshot, model: Any, folder: Path) -> None:
    """Writes params.npz (each parameter under its path) and model.keras (averaged parameters, where there are any)."""
    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, Any] = dict(sorted(_of_model(snapshot).items()))
    np.savez(folder / "params.npz", **named)
    values = evaluated(snapshot) | snapshot.state
    for variable in model.variables:
        if variable.path in values:
            variable.assign(values[variable.path])
    model.save(folder / "model.keras")


def _of_model(snapshot: Snapshot) -> dict[str, Any]:
    """Parameters and state, without those of training that are not the model's."""
    return {
        path: value
        for path, value in (snapshot.parameters | snapshot.state).items()
        if path != loss_scale.PARAMETER.path
    }
