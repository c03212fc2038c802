"""The facts about a model and its data that a plan needs, computed once by a short-lived process and cached.

Planning needs the shapes of the parameters, which only building the model shows; building it needs TensorFlow, which
takes seconds to import and must not be in the launcher. So a child (`python -m trainer.launch.describe`, or a fork of
the nursery) builds the model once, and the answer is cached by everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from trainer.config.schema import DataConfig, ModelConfig
from trainer.faults.exit_codes import TrainerError
from trainer.plan.fingerprint import Fingerprint
from trainer.plan.layout import FrozenWeights, Parameter
from trainer.plan.tables import SparsePattern, Table

FORMAT = 15  # of the cached file; raise it when Description changes

# What describing a model leaves for the tasks, in the run directory.
FROZEN_FILE = "frozen.npz"  # what training never changes; a checkpoint has it too
INITIAL_FILE = "initial.npz"  # parameters and state, where `model.init` names some


class LeftOut(NamedTuple):
    """A setting of an optimizer of compile() for which the config has no key."""

    text: str
    key: str  # the key of the section optimizer that replaces it
    remedy: str


Waits = Callable[[str, float], None]  # takes the running line of the user's code, and its seconds so far


class CompiledOptimizer(NamedTuple):
    """The optimizer that the model's compile() received."""

    name: str  # of its class, in lower case
    settings: Mapping[str, Any]  # keys of the config's optimizer with their values
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class Description:
    """A model's parameters and its data's dimensions."""

    parameters: tuple[Parameter, ...]
    classes: int
    train_examples: int  # 0: unknown
    evaluate_examples: int
    is_stream: bool = False  # the data has its own order
    is_divided: bool = False  # one pass over it is for all replicas
    shares_order: bool = False  # an evaluation changes the training examples, or their order
    written: tuple[str, ...] = ()  # files that a pipeline writes as it is read: cache('FILE')
    model_batch: int = 0  # examples that the model takes at once; 0: any number
    layers: tuple[str, ...] = ()  # paths, of layers inside layers too
    unreached: tuple[str, ...] = ()  # trainable parameters that have no gradient: the loss does not depend on them
    exchanging: tuple[str, ...] = ()  # layers and losses that exchange values with other replicas
    counts: int = 0  # different counts that losses are divided by, if they may differ between parts of a batch
    is_one_mean: bool = True  # whether all losses have the same count
    scalars: tuple[str, ...] = ()  # what returns one number for a batch, with an unknown count
    mixing: tuple[str, ...] = ()  # what computes an example with others of its batch
    is_summed: bool = False  # the loss of a batch is a sum over its examples, not a mean
    sums: int = 0  # floats of the metrics' variables
    metrics: tuple[str, ...] = ()  # their names in evaluations, besides the loss
    frozen: FrozenWeights = field(default_factory=FrozenWeights)
    initial: str = ""  # what was loaded of `model.init`, and what was not
    not_adapted: tuple[str, ...] = ()  # layers that should have adapted to the data
    compiled_optimizer: CompiledOptimizer | None = None
    objective: str = ""  # loss and metrics, and where they come from
    doubts: tuple[tuple[str, str], ...] = ()  # (message, remedy) of what the model is trained with all the same
    warnings: tuple[str, ...] = ()  # of Python and Keras, from the user's code
    tables: tuple[Table, ...] = ()  # of sparse layers
    lookups: Mapping[str, int] = field(default_factory=dict)  # by Embedding layer: ids of an example; 0: unknown
    fingerprint: Fingerprint = field(default_factory=dict)  # of the data


@dataclass(frozen=True)
class ModelProbe:
    """Everything that a description depends on."""

    model: dict[str, Any]
    data: dict[str, Any]
    user: str | None
    seed: int
    precision: str = "float32"
    freezes: list[dict[str, Any]] = field(default_factory=list)  # groups of parameters, see config/groups.py
    init: tuple[str, ...] = ()  # files with initial values
    frozen: str | None = None  # FROZEN_FILE of the checkpoint to resume from, whose values are taken
    store: str | None = None  # folder for FROZEN_FILE and INITIAL_FILE; none: they are not written
    batch: int = 0  # examples that a replica computes at once; 0: unknown
    sparse: tuple[SparsePattern, ...] = ()
    formats: tuple[str, ...] = ()  # of an export that must be possible
    evaluate_steps: int | None = None  # number of batches in an evaluation; None: all of the data, which must end

    @classmethod
    def about(cls, model: ModelConfig, data: DataConfig, *, user: str | None, seed: int) -> ModelProbe:
        return cls(asdict(model), {"name": data.name, "options": data.options}, user, seed)

    def key(self) -> str:
        """Returns a digest of what the answer depends on: options, code, user's file, data files, library versions."""
        files = sorted(Path(self.user).parent.glob("*.py")) if self.user else []  # it may import those beside it
        patterns = [str(Path(v).expanduser()) for v in self.data["options"].values() if isinstance(v, str) and v]
        paths = [Path(name) for v in patterns for name in sorted({v, *glob(v, recursive=True)})]
        files += [file for path in paths for file in _files_in(path)]
        stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        code = [(str(file), file.stat().st_mtime_ns) for file in sorted(Path(__file__).parents[1].rglob("*.py"))]
        versions = [metadata.version(name) for name in ("keras", "numpy")]
        question = asdict(replace(self, store=None))
        inputs = json.dumps([FORMAT, question, stamps, code, versions], sort_keys=True, default=str)
        return hashlib.sha256(inputs.encode()).hexdigest()


def _files_in(path: Path) -> list[Path]:
    """Returns the file itself, or all files of a folder, except of the working directory."""
    if path.is_file():
        return [path]
    is_data = path.is_dir() and path.resolve() not in (Path.cwd(), *Path.cwd().parents)
    return sorted(file for file in path.rglob("*") if file.is_file()) if is_data else []


class ProbeResult(TypedDict, total=False):
    """The answer of the process that builds a model, for JSON: the description, a problem or a failure."""

    description: Mapping[str, Any]
    problem: Mapping[str, Any]  # the fields of a Problem
    failure: str
    exit_code: int  # of a failure


class DescriptionError(TrainerError):
    """The model or its data cannot be used, for the reason that `exit_code` gives."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
