"""The trials of a sweep: their values and results, and the file that records them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from trainer.commands.sweep.space import Space, Values
from trainer.faults.exit_codes import CONFIG, OK, TrainerError
from trainer.storage.atomic import write_atomically

SETTINGS, TRIALS = "sweep.yaml", "trials.json"
WAITING, DONE = "waiting", "done"  # states of a trial; others say why it has no score


class OtherSweepError(TrainerError):
    """The folder belongs to a different sweep."""

    exit_code = CONFIG


@dataclass
class Trial:
    """The values of the swept keys, and the results of runs with them."""

    number: int
    values: Values
    scores: dict[int, float] = field(default_factory=dict)  # by the steps of a round
    state: str = WAITING
    code: int = 0  # the exit code of its last run
    trained: int = 0  # steps, which may be fewer than those of the round: it may have ended early
    params_sha256: str = ""

    @property
    def name(self) -> str:
        """Returns the name of the trial's run directory."""
        return f"{self.number:04d}"

    @property
    def steps(self) -> int:
        return max(self.scores, default=0)

    @property
    def score(self) -> float:
        """Returns the score after the most steps; NaN if there is none."""
        return self.scores.get(self.steps, math.nan)


@dataclass(frozen=True)
class SweepSettings:
    """The settings that identify a sweep; the same command continues it."""

    command: list[str]  # overrides that all trials have
    space: dict[str, Any]
    metric: str
    is_lowest: bool  # whether the lowest value of the metric is the best
    steps: int  # of a whole trial
    trials: int
    halving: int | None = None
    seed: int = 0
    parallel: int = 1  # trials at the same time, where values are drawn: each is drawn without those beside it
    cores: int | None = None  # of each trial, on which its threads and so its bits depend; None: all


DEFAULTS = {one.name: one.default for one in fields(SweepSettings)}


class Sweep:
    """A folder of trials."""

    def __init__(self, path: Path, settings: SweepSettings, space: Space) -> None:
        """Opens the folder, or makes it; `space` is the parsed space of the settings.

        Raises:
            OtherSweepError: if it belongs to a different sweep. The metric may change as long as no trial has a score.
        """
        self.path, self.settings, self.space = path, settings, space
        path.mkdir(parents=True, exist_ok=True)
        self.trials = self._read()
        file, said = path / SETTINGS, asdict(settings)
        before = yaml.safe_load(file.read_text()) if file.exists() else said
        different = [key for key in said if before.get(key, DEFAULTS.get(key)) != said[key]]
        if different and not (set(different) <= {"metric", "is_lowest"} and not any(one.scores for one in self.trials)):
            raise OtherSweepError(
                f"{path} belongs to a different sweep: {different[0]} was {before.get(different[0])}, now "
                f"{said[different[0]]}; repeat its command, or choose another run=PATH"
            )
        if different:
            for trial in self.trials:
                trial.state = WAITING if trial.code == OK else trial.state
            self.remember()
        write_atomically(file, yaml.safe_dump(said, sort_keys=False))

    def add(self, *values: Values) -> None:
        """Adds a trial for each of these values, and records it before it starts."""
        self.trials += [Trial(number, one) for number, one in enumerate(values, len(self.trials))]
        self.remember()

    def remember(self) -> None:
        write_atomically(self.path / TRIALS, json.dumps([asdict(one) for one in self.trials], indent=1))

    def run_of(self, trial: Trial) -> Path:
        return self.path / trial.name

    def loss_of(self, trial: Trial, steps: int) -> float:
        """Returns the score after these steps, negated if higher is better; NaN if there is none."""
        score = trial.scores.get(steps, math.nan)
        return score if self.settings.is_lowest else -score

    def ranked(self) -> list[Trial]:
        """Returns the trials, the best first: ordered by steps trained, then by score."""
        scored = [one for one in self.trials if one.scores]
        best = sorted(scored, key=lambda one: (-one.steps, self.loss_of(one, one.steps), one.number))
        return [*best, *(one for one in self.trials if not one.scores)]

    def best(self) -> Trial | None:
        first = next(iter(self.ranked()), None)
        return first if first is not None and not math.isnan(first.score) else None

    def _read(self) -> list[Trial]:
        file = self.path / TRIALS
        if not file.exists():
            return []
        read = [Trial(**one) for one in json.loads(file.read_text())]
        for one in read:
            one.scores = {int(steps): score for steps, score in one.scores.items()}
        return read


def rungs(steps: int, trials: int, factor: int | None) -> list[tuple[int, int]]:
    """Returns (steps, number of trials) of each round of successive halving; without it, of one round."""
    if factor is None:
        return [(steps, trials)]
    rounds = max(0, math.floor(math.log(trials) / math.log(factor) + 1e-9))
    return [
        (max(1, math.ceil(steps / factor ** (rounds - k))), max(1, math.ceil(trials / factor**k)))
        for k in range(rounds + 1)
    ]


def survivors(sweep: Sweep, steps: int, count: int) -> Sequence[Trial]:
    """Returns the best of the trials trained for this many steps, ordered by number."""
    reached = [one for one in sweep.trials if steps in one.scores]
    best = sorted(reached, key=lambda one: (sweep.loss_of(one, steps), one.number))[:count]
    return sorted(best, key=lambda one: one.number)
