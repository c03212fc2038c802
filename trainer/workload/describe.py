"""Describes a model and its data to the planner, in a process that may import TensorFlow."""

import traceback
from pathlib import Path
from typing import Any

from trainer.faults.exit_codes import exit_code_of
from trainer.plan.description import Description, Question
from trainer.plan.serialize import to_json


def answer(question: Question) -> dict[str, Any]:
    """Builds the model and opens the data.

    Returns:
        {"description": ...}, or {"problem": ...} of the config, or {"failure": text, "exit_code": ...}.
    """
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
            with_values=False,
        )
        parameters = build.parameters_of(built, question.precision)
        flops = flops_of(built, data_set.input_shape)
    except DataError as error:
        return {"failure": str(error), "exit_code": error.exit_code}
    except ValueError as error:
        if user is not None and any(Path(f.filename) == Path(user).resolve() for f in _frames(error)):
            return _failure(error)  # an error of the user's code, not of the command
        key = f"model={model['name']} data={data['name']}"
        remedy = "python -m trainer --help lists the names, conf/ their options"
        return {"problem": {"key": key, "message": str(error), "remedy": remedy}}
    except Exception as error:  # a user's function may raise anything
        return _failure(error)
    counts = data_set.train.count, data_set.evaluate.count
    layers = tuple(step.layers_of(built))
    description = Description(
        tuple(parameters), data_set.input_shape, data_set.classes, *counts, layers, flops.forward, flops.uncounted
    )
    return {"description": to_json(description)}


def _frames(error: Exception) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _failure(error: Exception) -> dict[str, Any]:
    place = _frames(error)[-1]
    text = f"{place.filename}, line {place.lineno}, in {place.name}: {type(error).__name__}: {error}"
    return {"failure": text, "exit_code": exit_code_of(error)}
