"""Draws values with Optuna.

A trial depends only on the seed, its number and earlier results, so a killed sweep continues as if it had not been.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands.sweep.space import Range, Space, Values
from trainer.commands.sweep.trials import Trial
from trainer.faults.exit_codes import CONFIG, TrainerError

DIGITS = 4  # of a number


class NoOptunaError(TrainerError):
    """Optuna is not installed."""

    exit_code = CONFIG


def suggest(space: Space, number: int, before: Sequence[Trial], *, is_lowest: bool, seed: int) -> Values:
    """Returns the values of a trial, by the tree-structured Parzen estimator, from the results of others before it."""
    optuna = _optuna()
    distributions = _distributions(optuna, space)
    sampler = optuna.samplers.TPESampler(seed=seed * 1_000_003 + number)
    study = optuna.create_study(sampler=sampler, direction=_direction(is_lowest))
    for trial in before:
        study.add_trial(_frozen(optuna, trial, space))
    asked = study.ask(distributions)
    return {key: _value(space[key], asked.params[key]) for key in space}


def write_journal(path: Path, name: str, space: Space, trials: Sequence[Trial], *, is_lowest: bool) -> None:
    """Writes the trials as a journal of Optuna, for `optuna-dashboard` and Optuna's own plots."""
    optuna = _optuna()
    path.unlink(missing_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(study_name=name, storage=storage, direction=_direction(is_lowest))
    study.add_trials([_frozen(optuna, trial, space) for trial in trials])


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise NoOptunaError("a sweep that draws values needs Optuna: pip install 'trainer[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _direction(is_lowest: bool) -> str:
    return "minimize" if is_lowest else "maximize"


def _distributions(optuna: Any, space: Space) -> dict[str, Any]:
    """Returns Optuna's distributions; choices are indices, because Optuna takes only numbers and strings."""
    kinds = optuna.distributions
    found: dict[str, Any] = {}
    for key, one in space.items():
        if not isinstance(one, Range):
            found[key] = kinds.CategoricalDistribution(range(len(one)))
        elif one.is_integer:
            found[key] = kinds.IntDistribution(int(one.low), int(one.high))
        else:
            found[key] = kinds.FloatDistribution(one.low, one.high, log=one.is_log)
    return found


def _value(one: Sequence[Any] | Range, drawn: Any) -> Any:
    """Returns a choice, or a number rounded to few digits."""
    if not isinstance(one, Range):
        return one[drawn]
    return drawn if one.is_integer else min(max(float(f"{drawn:.{DIGITS}g}"), one.low), one.high)


def _frozen(optuna: Any, trial: Trial, space: Space) -> Any:
    """Returns a trial as Optuna stores it; a trial without a score has failed."""
    has_score = not math.isnan(trial.score)
    own = trial.values
    return optuna.trial.create_trial(
        params={key: own[key] if isinstance(one, Range) else one.index(own[key]) for key, one in space.items()},
        distributions=_distributions(optuna, space),
        value=trial.score if has_score else None,
        state=optuna.trial.TrialState.COMPLETE if has_score else optuna.trial.TrialState.FAIL,
        user_attrs={"run": trial.name, "steps": trial.steps, "values": json.dumps(trial.values)},
    )
