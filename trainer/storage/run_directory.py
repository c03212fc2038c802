"""The folder of one run: its config, its plan, and everything that the run writes."""

import filecmp
import hashlib
import json
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer.config import former_keys, keys, shell, user_file, yaml_files
from trainer.config.schema import RunConfig
from trainer.config.typed import TypedConfig
from trainer.plan.description import FROZEN_FILE, INITIAL_FILE
from trainer.plan.plan import Plan
from trainer.plan.serialize import to_json
from trainer.storage import threads
from trainer.storage.atomic import link_or_copy, remove_all_leftovers, write_atomically
from trainer.storage.damage import DAMAGED, parsed

_log = logging.getLogger(__name__)

OF_MACHINE = ("gpus", "intra_op_threads")
OF_COMMAND = (  # sections and keys that tasks of a run may have each in its own way
    *("job", "task", "run", "launch", "container", "slurm", "prometheus", "loggers", "report", "given"),
)
MOST_GENERATIONS = 2**31  # a message stores its generation in 32 bits
DESCRIBED = "trainer-"  # names of temporary folders begin so


class RunDirectory:
    """Paths of a run's files; reads and writes config, plan and generation."""

    def __init__(self, path: Path, described: Path | None = None) -> None:
        """Takes the run's path; `described` holds the model's description until `write_inputs` moves it."""
        self.path, self._described = path, described
        self.lock = path / "lock"  # of the lease
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.code = path / "code.json"  # digests of the user's file and of its imports from the same folder
        self.status = path / "status.json"
        self.summary = path / "summary.json"
        self.history = path / "history.jsonl"
        self.event_log = path / "events.jsonl"  # what the launcher did and said
        self.requests = path / "requests"  # what other commands ask of the run
        self.logs = path / "logs"
        self.pages = path / "pages"  # sockets of status pages, while an isolated run lives
        self.events = path / "events"
        self.journal = path / "journal"
        self.placement = path / "placement.json"  # where everything ran, with device.log_placement=true
        self.loggers = path / "loggers"  # what they have had, and the files of some
        self.profile = path / "profile"
        self.generation = path / "generation.json"
        self.rollbacks = path / "rollbacks.jsonl"
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations.jsonl"  # an evaluator task writes this and best/
        self.best = path / "best"
        self.export = path / "export"
        self.frozen = (described or path) / FROZEN_FILE  # what training never changes
        self.initial = (described or path) / INITIAL_FILE  # first values that the model's own function does not give

    def write_inputs(self, config: RunConfig, plan: Plan) -> None:
        """Writes the config and the plan for the tasks, and removes an earlier run's reports."""
        remove_all_leftovers(self.path)  # the caller holds the lease, and no task has been started
        self.logs.mkdir(parents=True, exist_ok=True)
        self.summary.unlink(missing_ok=True)
        self.status.unlink(missing_ok=True)
        self.requests.mkdir(exist_ok=True)  # so the user of the tasks may write to it
        for path in self.requests.iterdir():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.path / "placement", ignore_errors=True)
        self.placement.unlink(missing_ok=True)
        self._take_described()
        loaded, _ = self._read_generation()
        write_atomically(self.generation, json.dumps({"loaded": loaded, "launched_at": loaded}))
        said = to_json(config)
        said["device"]["intra_op_threads"] = threads.of_jobs(config, plan)  # to continue the run elsewhere
        write_atomically(self.config, yaml.safe_dump(said, sort_keys=False))
        write_atomically(self.plan, json.dumps(plan.to_json(), indent=1))
        self.code.unlink(missing_ok=True)
        if config.user is not None:
            code = {"file": Path(config.user).name, "digests": user_file.digests(config.user)}
            write_atomically(self.code, json.dumps(code, indent=1))

    def _take_described(self) -> None:
        """Replaces the files of the model's description, because an earlier launch may have had others."""
        if self._described is None:
            return
        for name in (FROZEN_FILE, INITIAL_FILE):
            old, new = self.path / name, self._described / name
            if old.exists() and new.exists() and filecmp.cmp(old, new, shallow=False):
                continue  # its other names are in checkpoints
            old.unlink(missing_ok=True)
            if new.exists():
                link_or_copy(new, old)
        self.frozen, self.initial = self.path / FROZEN_FILE, self.path / INITIAL_FILE

    def discard_described(self) -> None:
        """Removes the files of the model's description, if no launcher does."""
        if self._described is not None:
            shutil.rmtree(self._described, ignore_errors=True)

    def has_loaded(self) -> bool:
        """Whether this launch of the run has already loaded a state."""
        loaded, launched_at = self._read_generation()
        return loaded > launched_at

    def next_generation(self) -> int:
        """Returns a generation higher than any before; it is on disk when this returns."""
        loaded, launched_at = self._read_generation()
        write_atomically(self.generation, json.dumps({"loaded": loaded + 1, "launched_at": launched_at}))
        return loaded + 1

    def _read_generation(self) -> tuple[int, int]:
        """Returns (loaded, launched_at); if the file is damaged, from the highest generation of the checkpoints."""
        try:
            generation = json.loads(self.generation.read_bytes())
            loaded, launched_at = generation["loaded"], generation["launched_at"]
            if type(loaded) is type(launched_at) is int and 0 <= launched_at <= loaded < MOST_GENERATIONS:
                return loaded, launched_at
        except FileNotFoundError:
            return 0, 0
        except DAMAGED:
            pass
        saved = [self._generation_of(path) for path in self.checkpoints.glob("*/manifest.json")]
        _log.warning("%s is damaged; reading the last generation from the checkpoints", self.generation)
        return max(saved, default=0), 0

    def _generation_of(self, manifest: Path) -> int:
        with suppress(OSError, *DAMAGED):
            generation = json.loads(manifest.read_bytes())["generation"]
            if type(generation) is int and 0 <= generation < MOST_GENERATIONS:
                return generation
        return 0

    def read_config(self) -> RunConfig:
        """Reads the config.

        Raises:
            RunFileError: if it is damaged.
            OSError: if it is missing, or cannot be read.
        """

        def parse(text: bytes) -> RunConfig:
            if not isinstance(value := yaml_files.load(text), dict):
                raise ValueError("it is empty" if value is None else "it has no keys")
            current, given = former_keys.replaced(value)
            typed = OmegaConf.to_object(OmegaConf.merge(keys.schema(), _literal(current)))
            assert isinstance(typed, TypedConfig)
            return typed.run_config(given)

        remedy = "type the settings of the run again, with run=PATH; it continues from its checkpoint"
        return parsed(self.config, parse, remedy)

    def read_plan(self) -> Plan:
        """Reads the plan; raises what `read_config` does."""
        remedy = "type the command of the run again, which rewrites it"
        return parsed(self.plan, lambda text: Plan.from_json(json.loads(text)), remedy)


@contextmanager
def description_folder() -> Iterator[Path]:
    """Returns a folder for the files that describing a model writes, until they move to the run directory."""
    with tempfile.TemporaryDirectory(prefix=DESCRIBED) as folder:
        yield Path(folder)


def _literal(value: Any) -> Any:
    """Returns a value of a stored config, whose `${` are not references."""
    if isinstance(value, dict):
        return {name: _literal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return shell.literal(value) if isinstance(value, str) else value


@contextmanager
def with_remedy(path: Path) -> Iterator[None]:
    """Adds a remedy to the error of a run directory that cannot be written."""
    try:
        yield
    except OSError as error:
        problem = f"the run directory cannot be written ({error.strerror or error})"
        raise OSError(f"{path}: {problem}; choose another with run=PATH") from error


def choose(config: RunConfig, described: Path | None = None) -> RunDirectory:
    """Returns the directory that the config names, or makes a new one under runs/ that no other run shares."""
    if config.run is not None:
        return RunDirectory(Path(config.run).resolve(), described)
    started = time.strftime("%Y%m%d-%H%M%S")
    while True:
        name = f"{config.name}-{config.cluster.name}-{started}-{secrets.token_hex(2)}"
        path = Path("runs").resolve() / name
        with with_remedy(path):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
        return RunDirectory(path, described)


def config_hash(config: RunConfig) -> str:
    """Returns a digest of everything that the tasks of a run must agree on; they do not always know the evaluators."""
    common = {name: value for name, value in to_json(config).items() if name not in OF_COMMAND}
    common["cluster"] = _without_evaluators(common["cluster"])
    # Of a machine, and known to its own tasks where a scheduler shares out GPUs and no launcher wrote one config.
    common["device"] = {name: value for name, value in common["device"].items() if name not in OF_MACHINE}
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:16]


def _without_evaluators(cluster: dict[str, Any]) -> dict[str, Any]:
    name = cluster["name"].removesuffix(f"{cluster['evaluator']}e")
    addresses = {job: listed for job, listed in cluster["addresses"].items() if job != "evaluator"}
    return cluster | {"name": name, "evaluator": 0, "addresses": addresses}
