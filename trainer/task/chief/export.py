"""Exports a finished run: its parameters by name, and the model as plain Keras loads it."""

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from trainer.engine.vectors.snapshot import Snapshot
from trainer.task.evaluator.score import evaluated
from trainer.workload import loss_scale, weights
from trainer.workload.error_text import first_line
from trainer.workload.step import is_seed

_log = logging.getLogger(__name__)


def params_sha256(snapshot: Snapshot) -> str:
    """SHA-256 over the little-endian float32 bytes of all parameters and state, in the order of their paths."""
    digest = hashlib.sha256()
    for _, value in sorted(_of_model(snapshot).items()):
        digest.update(np.ascontiguousarray(value, "<f4").tobytes())
    return digest.hexdigest()


def export(snapshot: Snapshot, model: Any, folder: Path) -> None:
    """Writes params.npz (each parameter and frozen weight) and model.keras (averaged parameters, where there are any).

    A model that Keras cannot save and load again as a whole, for want of a `get_config`, is written as model.weights.h5
    and as a SavedModel, which needs no code of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = _of_model(snapshot)
    frozen = {v.path: np.asarray(v.numpy()) for v in model.variables if v.path not in own and not is_seed(v)}
    named: dict[str, Any] = dict(sorted((own | frozen).items()))
    np.savez(folder / "params.npz", **named)
    weights.assign(model, evaluated(snapshot) | snapshot.state)
    try:
        model.save(folder / "model.keras")
        if warning := weights.check_loads(folder / "model.keras", model):
            _log.warning(warning)
    except OSError:
        raise
    except Exception as error:  # whatever a layer's get_config does: training is done
        (folder / "model.keras").unlink(missing_ok=True)
        _log.warning("Keras cannot load this model from a model.keras (%s); see model.weights.h5", first_line(error))
        model.save_weights(folder / "model.weights.h5")
        _export_saved_model(model, folder / "saved_model")


def _export_saved_model(model: Any, folder: Path) -> None:
    try:
        model.export(folder, verbose=False)
    except Exception as error:  # whatever a model's code does: the weights are safe
        shutil.rmtree(folder, ignore_errors=True)
        _log.warning("nor can TensorFlow as a SavedModel (%s)", first_line(error))


def _of_model(snapshot: Snapshot) -> dict[str, Any]:
    """Parameters and state, without those of training that are not the model's."""
    return {
        path: value
        for path, value in (snapshot.parameters | snapshot.state).items()
        if path != loss_scale.PARAMETER.path
    }
