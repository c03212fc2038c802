"""Describes a model and its data to the planner, in a process that may import TensorFlow."""

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.config import user_file
from trainer.faults import exit_codes
from trainer.faults.exit_codes import exit_code_of
from trainer.faults.problems import ConfigError, Problem
from trainer.plan.checks.sparse import check_patterns
from trainer.plan.description import FROZEN_FILE, INITIAL_FILE, Description, ModelProbe, ProbeResult
from trainer.plan.serialize import to_json
from trainer.workload import user_warnings
from trainer.workload.error_text import one_paragraph, words_of

OF_GRAPHS = ("SymbolicTensor", "OperatorNotAllowedInGraphError")  # in errors of code that needs values of tensors


def answer(question: ModelProbe) -> ProbeResult:
    """Builds the model, opens the data, and computes the loss of a batch.

    Returns:
        {"description": ...}, or {"problem": ...} of the config, or {"failure": text, "exit_code": ...}.
    """
    from trainer.workload.data import DataError
    from trainer.workload.data.examples import SeveralInputsError

    try:
        with user_warnings.recorded(question.user) as told:
            description = _describe(question)
        return {"description": to_json(replace(description, warnings=tuple(told)))}
    except DataError as error:
        return {"failure": str(error), "exit_code": error.exit_code}
    except ConfigError as error:
        return {"problem": asdict(error.problems[0])}
    except ValueError as error:
        if _place_in(question.user, error) is not None:
            return _failure(error, question.user)  # an error of the user's code, not of the command
        key = f"model={question.model['name']} data={question.data['name']}"
        own = [name for name in (question.model["name"], question.data["name"]) if _is_users(question.user, name)]
        remedy = "python -m trainer --help lists the names, conf/ their options"
        if own:
            remedy = f"see {' and '.join(own)} in {question.user}"
        if isinstance(error, SeveralInputsError) and _can_be_a_matrix(question.data["name"]):
            remedy = "type data.options.matrix=true to have the columns as one array"
        return {"problem": asdict(Problem(key, "failed", words_of(error), remedy, about="model"))}
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        return _failure(error, question.user)


def _describe(question: ModelProbe) -> Description:
    from trainer.workload import (
        build,
        compiled_optimizer,
        frozen,
        lookups,
        probe,
        serving,
        step,
        tracing,
        trial,
        weights,
    )
    from trainer.workload.adapting import Adapting, not_adapted
    from trainer.workload.compiling import Wanted
    from trainer.workload.data import pipeline_files
    from trainer.workload.data.examples import Stream, count_of
    from trainer.workload.data.fingerprint import fingerprint_of
    from trainer.workload.models import MODELS

    named, data, user = question.model, question.data, question.user
    has_values = question.freezes != [] or (user is not None and named["name"] not in MODELS)
    stored = frozen.read(Path(question.frozen)) if question.frozen else None
    adapting = Adapting(stored.adapted if stored else None)
    with compiled_optimizer.noted(), pipeline_files.noted() as written:
        data_set = build.open_data_set(
            data["name"], data["options"], seed=question.seed, user_file=user, evaluate_steps=question.evaluate_steps
        )
        fingerprint = fingerprint_of(data_set)  # before random numbers are drawn, as in a task
        has_values = has_values or bool(data_set.faults)  # the loss of such labels is tried
        build.check_hooks(user)
        model = build.build_model(
            named["name"],
            named["options"],
            data_set,
            seed=question.seed,
            user_file=user,
            precision=question.precision,
            with_values=has_values or bool(question.init or question.formats),
            freezes=question.freezes,
            adapting=adapting,
            sparse=question.sparse,
        )
    if faults := [*check_patterns(question.sparse, lookups.embeddings(model))]:
        raise ConfigError(faults)
    if not model.trainable_variables and not lookups.has_tables(model):
        reason = ": optimizer.groups freezes them" if question.freezes else ""
        raise ValueError(f"model {named['name']} has no trainable variables{reason}, so there is nothing to train")
    initial = weights.load(model, question.init) if question.init else ""
    if stored:
        weights.assign(model, stored.weights)
    optimizer = compiled_optimizer.read(model)  # before the objective compiles it again
    wanted = Wanted.of(named)
    objective = build.open_objective(model, data_set, wanted, user_file=user)
    model_batch = trial.run(objective, data_set, has_values=has_values, batch=question.batch)
    if question.formats:
        try:
            serving.check(objective, data_set, question.formats)
        except serving.ExportError as error:
            remedy = "leave that format out of export.formats, or change the model"
            raise ConfigError([Problem("export.formats", "not-supported", str(error), remedy)]) from error
    unchanged = frozen.find(objective, data_set.spec) if has_values else []  # built-in models have none of their own
    values = frozen.Frozen(frozen.values_of(model, unchanged), adapting.states)
    if question.store:
        _store(Path(question.store), values, step.initial_values(model, unchanged) if initial else {})
    # The default loss of a built-in model depends on all of its variables, and exchanges nothing.
    is_own = has_values or user is not None or wanted.loss is not None or bool(wanted.loss_options)
    probed = probe.probe(objective, data_set.spec, batch=model_batch) if is_own else probe.Probed()
    return Description(
        parameters=tuple(build.parameters_of(model, question.precision, unchanged)),
        classes=data_set.spec.classes,
        train_examples=count_of(data_set.train),
        evaluate_examples=count_of(data_set.evaluate),
        is_stream=isinstance(data_set.train, Stream),
        written=tuple(dict.fromkeys(written)),
        is_divided=isinstance(data_set.train, Stream) and data_set.train.is_divided,
        shares_order=data_set.shares_order,
        model_batch=model_batch,
        layers=tuple(step.layers_of(model)),
        **probed._asdict(),
        mixing=objective.mixing,
        is_summed=objective.is_summed,
        sums=objective.size,
        metrics=objective.metric_names(),
        frozen=frozen.describe(*values),
        initial=initial,
        not_adapted=tuple(not_adapted(model)) if has_values else (),
        compiled_optimizer=optimizer,
        objective=objective.text,
        doubts=(*data_set.doubts, *((one.message, one.remedy) for one in objective.doubts)),
        tables=tracing.tables_of(objective, data_set.spec),
        lookups=tracing.lookup_counts(objective, data_set.spec),
        fingerprint=fingerprint,
    )


def _store(folder: Path, frozen: Any, initial: Mapping[str, Any]) -> None:
    """Stores results that each task would otherwise compute again."""
    import numpy as np

    from trainer.workload.frozen import write

    if any(frozen):
        write(folder / FROZEN_FILE, frozen)
    if initial:
        np.savez(folder / INITIAL_FILE, **initial)


def _can_be_a_matrix(data: str) -> bool:
    from trainer.workload.data import DATA_SETS

    return data in DATA_SETS and "matrix" in inspect.signature(DATA_SETS[data]).parameters


def _is_users(user: str | None, name: str) -> bool:
    return user is not None and name in user_file.definitions(user)


def _place_in(user: str | None, error: BaseException | None) -> tuple[traceback.FrameSummary, BaseException] | None:
    """Returns the innermost line of the user's file, or of one beside it, that raised an error or its cause."""
    if user is None or error is None:
        return None
    folder = Path(user).resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if Path(frame.filename).parent == folder), None)
    return _place_in(user, error.__cause__) if own is None else (own, error)


def _failure(raised: BaseException, user: str | None) -> ProbeResult:
    own = _place_in(user, raised)
    place, error = own or (traceback.extract_tb(raised.__traceback__)[-1], raised)
    text = f"{place.filename}, line {place.lineno}, in {place.name}: {one_paragraph(error)}"
    if any(one in text for one in OF_GRAPHS):
        text += "; a step is a graph, whatever run_eagerly says: use keras.ops, not numpy, nor if and for on tensors"
    return {"failure": text, "exit_code": exit_code_of(error) if own is None else exit_codes.BAD_DATA}
