"""The form that starts a run: turns its fields into overrides, and shows their problems at the fields.

Input becomes arguments of a process, never words of a shell. Only keys that say what is trained, and how, are
accepted: none that names a command, a file to write, or Python code or runs outside the console's folders.
"""

import json
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainer.commands.console.folder import Folder, UnknownRunError
from trainer.config import sources
from trainer.config.keys import shown
from trainer.config.schema import Launch, StrategyName
from trainer.config.typed import ConsoleConfig
from trainer.faults.problems import Problem
from trainer.observe.report import settings
from trainer.plan.plan import Plan
from trainer.storage.run_directory import RunDirectory

PLAN_SECS = 120.0  # for TensorFlow to build the model once
MOST = {"ps": 1000, "workers": 10_000, "gpus": 64}
SECTIONS = (
    *("model", "data", "strategy", "optimizer", "device", "placement", "train", "evaluate", "checkpoint", "history"),
    *("timeouts", "restart", "seed", "profile", "resume", "user", "experiment"),
)
PROGRAMS = {Launch.local: None, Launch.docker: "docker", Launch.slurm: "sbatch"}  # that a launcher needs here


@dataclass(frozen=True)
class Field:
    """One field of the form."""

    name: str
    label: str
    key: str  # of the config; problems of keys that begin with it are shown here
    default: str = ""
    choices: Sequence[str] = ()
    hint: str = ""


def fields() -> list[Field]:
    """Returns the fields, in order."""
    launches = [one.value for one, program in PROGRAMS.items() if program is None or shutil.which(program)]
    return [
        Field("name", "name", "name", "run", hint="lowercase letters, digits and -"),
        Field("ps", "parameter servers", "cluster", "1"),
        Field("workers", "workers", "cluster", "2"),
        Field("evaluator", "evaluator", "cluster", "no", ["no", "yes"]),
        Field("launch", "launch", "launch", "local", launches),
        Field("strategy", "strategy", "strategy", "auto", [str(one.value) for one in StrategyName]),
        Field("model", "model", "model", "cnn", _choices("model"), "or a function of the file named by user="),
        Field("data", "data", "data", "mnist_10k", _choices("data"), "or a function of that file"),
        Field("optimizer", "optimizer", "optimizer", "", ["", *_choices("optimizer")], "default: the model's, or adam"),
        Field("learning_rate", "learning rate", "optimizer.learning_rate", hint="default: the optimizer's"),
        Field("batch_size", "batch size", "train.batch_size", "256", hint="examples of an update, over all replicas"),
        Field("steps", "steps", "train.steps", "300"),
        Field("epochs", "epochs", "train.epochs", hint="instead of steps"),
        Field("gpus", "GPUs of each worker", "device.gpus", "0"),
        Field("memory_fraction", "share of each GPU's memory", "device.memory_fraction", hint="(0, 1]; only with GPUs"),
    ]


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (sources.conf_dir() / group).glob("*.yaml"))


@dataclass
class Draft:
    """The values that were typed, their overrides, and their problems."""

    values: dict[str, str]
    overrides: list[str] = field(default_factory=list)
    problems: dict[str, list[Problem]] = field(default_factory=dict)  # by field; "" for those of no field
    plan: Plan | None = None

    def add(self, name: str, problem: Problem) -> None:
        self.problems.setdefault(name, []).append(problem)


def read(values: Mapping[str, str], folder: Folder, config: ConsoleConfig) -> Draft:
    """Turns the values that were typed into overrides; keys that are not allowed here are problems."""
    draft = Draft({one.name: values.get(one.name, one.default).strip() for one in fields()})
    draft.values["more"] = values.get("more", "")
    given = draft.values
    for name in ("ps", "workers", "gpus"):
        if not given[name].isdecimal() or int(given[name]) > MOST[name]:
            message = f"{given[name]!r} is not a whole number up to {MOST[name]}"
            draft.add(name, Problem(name, "out-of-range", message, "e.g. 2"))
    if not draft.problems:
        draft.overrides += _cluster(given)
    for name in ("name", "launch", "strategy", "model", "data", "optimizer"):
        if name == "optimizer" and not given[name]:
            continue
        if re.fullmatch(r"[\w.-]{1,64}", given[name]):
            draft.overrides.append(f"{name}={given[name]}")
        else:
            draft.add(name, Problem(name, "malformed", f"{given[name]!r} is not a name", "use letters, digits and _.-"))
    length = "epochs" if given["epochs"] else "steps"
    numbers = [one for one in fields() if one.name in ("learning_rate", "batch_size", length)]
    draft.overrides += [f"{one.key}={given[one.name]}" for one in numbers if given[one.name]]
    for line in filter(None, map(str.strip, given["more"].splitlines())):
        problem = _refusal(line, folder, config)
        if problem:
            draft.add("more", problem)
        else:
            draft.overrides.append(line)
    return draft


def _cluster(given: Mapping[str, str]) -> list[str]:
    ps, workers, gpus = (int(given[name]) for name in ("ps", "workers", "gpus"))
    evaluator = "1e" if given["evaluator"] == "yes" else ""
    is_local = not ps and workers <= 1 and not evaluator
    size = "local" if is_local else f"{f'{ps}ps' if ps else ''}{workers}w{evaluator}"
    if not gpus:
        return [f"cluster={size}"]
    named = shown({f"worker:{i}": [gpus * i + j for j in range(gpus)] for i in range(max(1, workers))})
    replicas = f"[{','.join(f'/gpu:{j}' for j in range(gpus))}]"
    share = f"device.memory_fraction={{worker:{given['memory_fraction']}}}"
    more = [share] if given["memory_fraction"] else []
    return [f"cluster={size}", "device=gpu", f"device.gpus={named}", f"device.replicas={replicas}", *more]


def _refusal(line: str, folder: Folder, config: ConsoleConfig) -> Problem | None:
    """Returns why a line of overrides, parsed as Hydra does, is refused; None if it is accepted."""
    try:
        (parsed,) = OverridesParser.create().parse_overrides([line])
        key, value = parsed.key_or_group, parsed.value()
        is_plain = not (parsed.is_delete() or parsed.is_sweep_override() or parsed.package) and "${" not in line
    except (HydraException, ValueError, RecursionError):
        remedy = "one key=value on each line, e.g. optimizer.clip_norm=1"
        return Problem(line, "malformed", "is not an override", remedy, about="override")
    section = key.split(".")[0]
    if not is_plain or "/" in key or section not in SECTIONS or (section == key and isinstance(value, dict | list)):
        message = "cannot be set from the console"
        return Problem(key, "not-allowed", message, f"allowed here: single keys of {', '.join(SECTIONS)}")
    if key == "user":
        return _outside(str(value), config.user_folder, "console.user_folder")
    if key in ("resume", "model.init") and value not in ("auto", "never", None):
        return _outside(str(value), str(folder.path), "runs.folder")
    if key == "experiment" and not re.fullmatch(r"\w+", str(value)):
        return Problem(key, "not-allowed", "cannot be a file here", "name one of conf/experiment")
    return None


def _outside(value: str, allowed: str | None, key: str) -> Problem | None:
    """Returns the problem of a path that leads outside a folder, links followed."""
    if allowed is None:
        return Problem("user", "not-allowed", "is not allowed here", f"start the console with {key}=FOLDER")
    try:
        if Path(value).resolve().is_relative_to(Path(allowed).resolve()):
            return None
    except (OSError, ValueError, RuntimeError):
        pass
    return Problem(value, "not-allowed", f"is not below {allowed} ({key})", "give a path in that folder", about=key)


def examine(draft: Draft, user_folder: str | None, *, with_plan: bool) -> None:
    """Adds the problems of a draft's overrides, and its plan, computed in a separate process."""
    if draft.problems:
        return
    words = ["--plan"] if with_plan else []
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "trainer.commands.console.trial", *words],
            input=json.dumps({"overrides": draft.overrides, "user_folder": user_folder}),
            capture_output=True,
            text=True,
            timeout=PLAN_SECS,
            check=False,
        )
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        draft.add("", Problem("plan", "failed", "could not be made", "see python -m trainer plan in a terminal"))
        return
    for one in answer["problems"]:
        problem = Problem(**one)
        draft.add(_field_of(problem), problem)
    draft.plan = None if answer["plan"] is None else Plan.from_json(answer["plan"])


def _field_of(problem: Problem) -> str:
    """Returns the field that shows a problem: the one with the longest matching key, or else `more`."""
    key = problem.key.lstrip("+").partition("=")[0]
    known = [one for one in fields() if f"{key}.".startswith(f"{one.key}.")]
    return max(known, key=lambda one: len(one.key)).name if known else "more"


def choose_directory(draft: Draft, folder: Folder) -> Path:
    """Returns a unique directory for a new run."""
    size = next(text.partition("=")[2] for text in draft.overrides if text.startswith("cluster="))
    started = time.strftime("%Y%m%d-%H%M%S")
    return folder.path / f"{draft.values['name']}-{size}-{started}-{secrets.token_hex(2)}"


def from_run(name: str, folder: Folder) -> dict[str, str]:
    """Returns the values of the form for another run's config; empty if there is no such run."""
    try:
        config = RunDirectory(folder.run(name)).read_config()
    except UnknownRunError:
        return {}
    chosen = config.given  # the other settings come from the model
    changed = [row for row in settings.changed(config) if _is_chosen(row[0], chosen)]
    values = {
        "name": config.name,
        "ps": str(config.cluster.ps),
        "workers": str(config.cluster.worker),
        "evaluator": "yes" if config.cluster.evaluator else "no",
        "launch": config.launch.name.value,
        "strategy": str(config.strategy.name.value),
        "model": config.model.name,
        "data": config.data.name,
        "optimizer": config.optimizer.name.value if "name" in chosen else "",
        "learning_rate": next((value for key, value, _ in changed if key == "optimizer.learning_rate"), ""),
        "batch_size": str(config.train.batch_size),
        "steps": str(config.train.steps),
        "epochs": str(config.train.epochs or ""),
    }
    of_fields = [one.key for one in fields() if not one.key.startswith("device.")]  # which may differ by task
    own = ("cluster.name", "strategy.name", "launch.name", *of_fields)
    rows = [(key, value) for key, value, _ in changed if key not in own]
    more = [f"{key}={value}" for key, value in rows if key.partition(".")[0] in SECTIONS and value]
    return values | {"more": "\n".join(more)}


def _is_chosen(key: str, of_optimizer: Sequence[str]) -> bool:
    section, _, name = key.partition(".")
    return section != "optimizer" or (name.partition(".")[0] or "name") in of_optimizer
