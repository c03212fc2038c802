"""What a plan must know of a model and its data, found out once by a short-lived process and remembered.

Planning needs the shapes of the parameters, and only building the model tells them; building it needs TensorFlow, which
takes seconds to import and must not be in the launcher. So a child (`python -m trainer.plan.description`, or a fork
of the nursery) builds the model once, and the answer is cached by everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer.config.schema import ConfigError, DataConfig, ModelConfig, Problem
from trainer.plan.placement import Parameter

FORMAT = 3  # of the cached file; raise it when Description changes


@dataclass(frozen=True)
class Description:
    """A model's parameters and its data's dimensions."""

    parameters: tuple[Parameter, ...]
    input_shape: tuple[int, ...]  # of one example
    classes: int
    train_examples: int
    evaluate_examples: int
    layers: tuple[str, ...] = ()  # paths, of layers inside layers too
    flops: int = 0  # floating-point operations of one example's forward pass
    uncounted: tuple[str, ...] = ()  # layers that they lack, because nobody can count theirs

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"parameters": [p._asdict() for p in self.parameters]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Description:
        parameters = tuple(Parameter(p["path"], tuple(p["shape"]), p["trainable"]) for p in value.pop("parameters"))
        layers, uncounted = tuple(value.pop("layers")), tuple(value.pop("uncounted"))
        return cls(parameters, tuple(value.pop("input_shape")), layers=layers, uncounted=uncounted, **value)


@dataclass(frozen=True)
class Question:
    """Everything that a description depends on."""

    model: dict[str, Any]
    data: dict[str, Any]
    user: str | None
    seed: int
    precision: str = "float32"

    @classmethod
    def about(
        cls, model: ModelConfig, data: DataConfig, *, user: str | None, seed: int, precision: str = "float32"
    ) -> Question:
        named = {"name": model.name, "options": model.options, "loss": model.loss.value}
        return cls(named, {"name": data.name, "options": data.options}, user, seed, precision)

    def is_cacheable(self) -> bool:
        """Whether `key` covers all that the answer depends on: a data function of the user's may read any file."""
        if self.user is None:
            return True
        from trainer.workload.data import DATA_SETS  # imports numpy

        return self.data["name"] in DATA_SETS

    def key(self) -> str:
        """A digest that changes whenever the answer may: options, code, user's file, data files, library versions."""
        files = sorted(Path(self.user).parent.glob("*.py")) if self.user else []  # it may import those beside it
        patterns = [v for v in self.data["options"].values() if isinstance(v, str)]
        files += [Path(name) for v in patterns for name in sorted({v, *glob(v)}) if Path(name).is_file()]
        stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        code = [(str(file), file.stat().st_mtime_ns) for file in sorted(Path(__file__).parents[1].rglob("*.py"))]
        versions = [metadata.version(name) for name in ("keras", "numpy")]
        told = json.dumps([FORMAT, asdict(self), stamps, code, versions], sort_keys=True, default=str)
        return hashlib.sha256(told.encode()).hexdigest()


def describe(question: Question, child: Callable[[Question], dict[str, Any]] | None = None) -> Description:
    """Answers from the cache, else asks a child process that imports TensorFlow.

    Args:
        child: runs `answer` in a process with TensorFlow; by default a new one.

    Raises:
        ConfigError: if the model or the data set refuses its options.
        DescriptionError: if the data cannot be used, or the model cannot be built.
    """
    cached = _cache_file(question) if question.is_cacheable() else None
    try:
        if cached is not None:
            return Description.from_json(json.loads(cached.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or from another version: ask again
    told = (child or _ask_new_process)(question)
    if "problem" in told:
        raise ConfigError([Problem(**told["problem"])])
    if "failure" in told:
        raise DescriptionError(told["failure"], told["exit_code"])
    if cached is not None:
        _write_atomically(cached, json.dumps(told["description"]))
    return Description.from_json(told["description"])


class DescriptionError(Exception):
    """The model or its data cannot be used; `exit_code` says of which kind the failure is."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def answer(question: Question) -> dict[str, Any]:
    """Builds the model and opens the data, in a process that may import TensorFlow.

    Returns:
        {"description": ...}, or {"problem": ...} of the config, or {"failure": text, "exit_code": ...}.
    """
    from trainer.faults.exit_codes import exit_code_of
    from trainer.workload import build, step
    from trainer.workload.data import DataError
    from trainer.workload.models.flops import flops_of

    model, data, user = question.model, question.data, question.user
    try:
        data_set = build.open_data_set(data["name"], data["options"], seed=question.seed, user_file=user)
        built = build.build_model(
            model["name"],
            model["options"],
            data_set,
            seed=question.seed,
            user_file=user,
            precision=question.precision,
        )
        parameters = build.parameters_of(built, question.precision)
        flops = flops_of(built, data_set.input_shape)
    except DataError as error:
        return {"failure": str(error), "exit_code": exit_code_of(error)}
    except ValueError as error:
        if user is not None and any(Path(f.filename) == Path(user).resolve() for f in _frames(error)):
            return _failure(error)  # in the user's own code, not in what was typed
        remedy = "python -m trainer --help lists the names, conf/ their options"
        return {
            "problem": {"key": f"model={model['name']} data={data['name']}", "message": str(error), "remedy": remedy}
        }
    except Exception as error:  # whatever a user's function raises is told, with its kind, to whoever asked
        return _failure(error)
    description = Description(
        tuple(parameters),
        data_set.input_shape,
        data_set.classes,
        data_set.train.count,
        data_set.evaluate.count,
        tuple(step.layers_of(built)),
        flops.forward,
        flops.uncounted,
    )
    return {"description": description.to_json()}


def _frames(error: Exception) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _failure(error: Exception) -> dict[str, Any]:
    from trainer.faults.exit_codes import exit_code_of

    place = _frames(error)[-1]
    text = f"{place.filename}, line {place.lineno}, in {place.name}: {type(error).__name__}: {error}"
    return {"failure": text, "exit_code": exit_code_of(error)}


def _ask_new_process(question: Question) -> dict[str, Any]:
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    child = subprocess.run(
        [sys.executable, "-m", "trainer.plan.description", json.dumps(asdict(question))],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if child.returncode != 0:
        return {"failure": f"describing the model failed:\n{child.stderr[-2000:]}", "exit_code": 70}
    told: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return told


def _cache_file(question: Question) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "trainer" / "models" / f"{question.key()}.json"


def _write_atomically(path: Path, text: str) -> None:
    """A cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as temporary:
            temporary.write(text)
        os.replace(temporary.name, path)
    except OSError as error:
        print(f"trainer: the model's description is not cached: {error}", file=sys.stderr)


if __name__ == "__main__":
    print(json.dumps(answer(Question(**json.loads(sys.argv[1])))))
