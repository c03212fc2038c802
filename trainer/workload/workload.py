"""Opens what a run trains: its model, its data and its objective, as they were planned."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from trainer.config import unrepeatable
from trainer.config.groups import freezing
from trainer.config.schema import RunConfig
from trainer.plan import fingerprint
from trainer.plan.plan import Plan
from trainer.plan.tables import sparse_patterns
from trainer.workload import frozen as frozen_weights
from trainer.workload import labels, weights
from trainer.workload.adapting import Adapting
from trainer.workload.build import build_model, open_data_set, open_objective
from trainer.workload.compiling import Wanted
from trainer.workload.data import DataError, DataSet
from trainer.workload.data.fingerprint import fingerprint_of
from trainer.workload.objective import Objective

SAME_WEIGHTS = "its function must return the same ones in every task, e.g. load them from one file"


class Workload(NamedTuple):
    """The model, data and objective of a run."""

    model: keras.Model
    data: DataSet
    objective: Objective
    frozen: Mapping[str, np.ndarray]


def open_workload(
    config: RunConfig, plan: Plan, file: Path | None = None, *, with_values: bool = True, trains: bool = True
) -> Workload:
    """Returns the model, the data and the objective of a run; `with_values` as in `build_model`.

    Args:
        file: the frozen values, if they were written; else those of the model's function are used.
        trains: whether the data must be that of the plan.

    Raises:
        DataError: if the frozen values are not the planned ones.
        OtherDataError: if the data is not that of the plan.
    """
    process = os.getpid()
    frozen = frozen_weights.read(file) if plan.frozen.sha256 and file and file.exists() else None
    adapting = Adapting(frozen.adapted if frozen else None)
    data = open_data_set(
        config.data.name,
        config.data.options,
        seed=config.seed,
        user_file=config.user,
        evaluate_steps=config.evaluate.steps,
    )
    if trains:
        _check_planned_data(config, plan, data)
    named = config.model
    model = build_model(
        named.name,
        named.options,
        data,
        seed=config.seed,
        user_file=config.user,
        precision=config.train.precision.value,
        with_values=with_values or bool(plan.frozen.paths),
        freezes=freezing(config.optimizer),
        adapting=adapting,
        sparse=sparse_patterns(config.placement),
    )
    if os.getpid() != process:
        os._exit(0)  # a fork of the task by the user's code, which has returned
    if frozen:
        weights.assign(model, frozen.weights)
    wanted = Wanted.of(asdict(named))
    size, planned = plan.shards[0].sums, plan.frozen
    objective = open_objective(model, data, wanted, user_file=config.user, size=size, frozen=planned.paths)
    values = frozen_weights.values_of(model, planned.paths)
    if frozen_weights.describe(values, adapting.states) != planned:
        raise DataError(f"model {named.name}: its frozen weights differ from the planned ones; {SAME_WEIGHTS}")
    return Workload(model, labels.for_loss(objective, data), objective, values)


def _check_planned_data(config: RunConfig, plan: Plan, data: DataSet) -> None:
    fingerprint.check_same(
        plan.fingerprint,
        fingerprint_of(data),
        source=fingerprint.describe_source(config.data.name, config.user),
        whose="the plan was made for",
        suspects=unrepeatable.suspects(config.user),
    )


def open_dense(config: RunConfig, plan: Plan) -> Objective:
    """Returns the objective of a model whose sparse layers are dense: with all its variables."""
    dense = replace(config, placement=replace(config.placement, sparse=[], growing={}))
    return open_workload(dense, plan, trains=False).objective
