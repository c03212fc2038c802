"""Losses and gradients that are not finite: their updates are skipped, and the run reacts as the config says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from quick_config import load
from runs import SMALL, Run

from trainer.config.schema import NotFinitePolicy
from trainer.engine.step_result import StepResult
from trainer.faults import exit_codes
from trainer.faults.exit_codes import NotFiniteError, RollbackError
from trainer.plan.devices import Machine
from trainer.plan.validate import validate
from trainer.storage import checkpoint
from trainer.storage.rollbacks import count_rollbacks, record_rollback
from trainer.task import not_finite
from trainer.task.not_finite import order_seed, reaction
from trainer.workload.data.order import batch_indices

Finish = Callable[..., Run]
BAD = StepResult(2, 42, 0.5, stop=False, bad=41)

# ---- reactions


@pytest.mark.parametrize(
    ("policy", "rollbacks", "expected"),
    [
        ("stop", 0, not_finite.stop),
        ("skip", 9, not_finite.skip),
        ("rollback", 0, not_finite.roll_back),
        ("rollback", 2, not_finite.roll_back),
        ("rollback", 3, not_finite.stop),
    ],
)
def test_the_policy_chooses_the_reaction_and_a_run_goes_back_at_most_three_times(policy, rollbacks, expected):
    assert reaction(NotFinitePolicy(policy), rollbacks=rollbacks) is expected


def test_a_run_that_stops_exits_with_65(raises):
    with raises(NotFiniteError) as raised:
        not_finite.stop(BAD)
    assert exit_codes.exit_code_of(raised.value) == 65


def test_a_run_that_goes_back_exits_with_75_and_its_step(raises):
    with raises(RollbackError) as raised:
        not_finite.roll_back(BAD)
    assert (exit_codes.exit_code_of(raised.value), raised.value.step) == (75, 41)


def test_each_rollback_is_a_line(tmp_path: Path):
    path = tmp_path / "rollbacks.jsonl"
    counts = [count_rollbacks(path)]
    for step, newest in ((7, None), (41, 40)):
        record_rollback(path, step=step, checkpoint=newest)
        counts.append(count_rollbacks(path))
    assert counts == [0, 1, 2]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 7, "checkpoint": None},
        {"step": 41, "checkpoint": 40},
    ]


def test_the_data_order_is_that_of_the_seed_until_a_run_goes_back():
    assert [order_seed(seed, 0) for seed in (0, 7, 2**31 - 1)] == [0, 7, 2**31 - 1]


def test_each_rollback_changes_the_data_order():
    orders = [
        tuple(batch_indices(order_seed(7, n), 3, batch_size=8, replica=0, replicas=1, count=1000).numpy())
        for n in range(not_finite.ROLLBACKS_AT_MOST + 1)
    ]
    assert len(set(orders)) == 4


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        (["cluster=1ps2w", "job=worker", "task=0"], "job/not-set train.on_not_finite/conflict"),
        (["restart.max=0"], "train.on_not_finite/conflict"),
        (["restart.max_of={worker:0}"], "train.on_not_finite/conflict"),
    ],
)
def test_rollback_is_refused_where_tasks_are_not_restarted(refused, overrides, codes):
    config = load([*overrides, "train.on_not_finite=rollback"])
    refused(codes, validate, config, Machine(cores=1, gpus=0))


# ---- real clusters

USER_FILE = '''
import keras
import numpy as np


@keras.saving.register_keras_serializable("tests")
class Fragile(keras.layers.Layer):
    """Makes the gradient of an example infinite whose first feature is 0; with `loss`, its loss too."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.loss = loss

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

    def call(self, inputs):
        first = self.weight * inputs[:, :1]
        return inputs + (keras.ops.log(first) if self.loss else keras.ops.sqrt(first))


def fragile(input_shape, classes, *, loss=False):
    inputs = keras.Input(input_shape)
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(8, name="dense")(inputs))
    hidden = keras.layers.Concatenate(name="both")([Fragile(loss, name="fragile")(inputs), hidden])
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(hidden))


def marked(*, at: list = [], count=2400):
    """Examples whose label says whether the second feature is large; the first feature is 0 in those in `at`."""
    features = np.random.default_rng(3).uniform(0.5, 1.5, (count, 4)).astype(np.float32)
    labels = (features[:, 1] > 1).astype(np.int64)
    good = features.copy()
    features[at, 0] = 0
    return {"train": (features, labels), "evaluate": (good[:480], labels[:480]), "classes": 2}
'''
SEED, COUNT, BATCH, STEPS = 1, 2400, 48, 12  # of SMALL


def indices_at(step: int, *, seed: int = SEED, replica: int = 0, replicas: int = 1) -> np.ndarray:
    """The examples of a replica's batch at a step."""
    options = {"batch_size": BATCH, "replica": replica, "replicas": replicas, "count": COUNT}
    return batch_indices(seed, step, **options).numpy()


@pytest.fixture
def fragile(tmp_path: Path) -> list[str]:
    """Overrides of a run in which the update to step 7 is bad, because of replica 1 where there are two."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    return [
        *(*SMALL, f"seed={SEED}", "user=mine.py", "model=fragile", "data=marked", "timeouts.roll_call_secs=60"),
        f"data.options.at=[{indices_at(6, replica=1, replicas=2)[0]}]",
    ]


def replica_errors(run: Run) -> dict[str, list[str]]:
    """By task, the lines of its log that name a bad replica."""
    logs = {log.stem: log.read_text().splitlines() for log in run.logs()}
    return {task: [line for line in lines if " ERROR replica " in line] for task, lines in logs.items()}


def newest(run: Run) -> dict[str, np.ndarray]:
    source, skipped = checkpoint.newest_valid(run.directory / "checkpoints")
    assert source is not None
    assert skipped == []
    return checkpoint.load(source)


def is_finite(run: Run) -> bool:
    return all(np.isfinite(value).all() for value in newest(run).values())


@pytest.mark.long(but=["loss"])
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "what"),
    [([], "the gradient of fragile/weight"), (["model.options.loss=true"], "the loss")],
    ids=["gradient", "loss"],
)
def test_a_run_stops_before_a_bad_update_and_names_the_replica(start, fragile, options, what):
    run = start("cluster=1ps2w", *fragile, *options, "checkpoint.every=1")
    assert run.wait() == 65, run.output
    assert "gradient of step 7" in run.output
    errors = replica_errors(run)
    assert (errors["ps-0"], errors["worker-0"], len(errors["worker-1"])) == ([], [], 1)
    assert f" worker:1 ERROR replica 1: {what}" in errors["worker-1"][0]
    assert max(int(path.name) for path in checkpoint.finished(run.directory / "checkpoints")) < 7
    assert is_finite(run)


CLUSTERS = ("1ps2w", "2ps2w", "2w")  # of two replicas each


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_that_skips_a_bad_update_ends_the_same_wherever_its_shards_are(finish: Finish, fragile):
    options = [*fragile, "train.on_not_finite=skip", "optimizer.clip_norm=0.5", "optimizer.ema=0.9"]
    runs = [finish(f"cluster={name}", *options, f"run={name}") for name in CLUSTERS]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1
    for run in runs:
        assert (run.summary()["steps"], is_finite(run)) == (STEPS, True)
        counts = [log.read_text().count("gradient of step 7") for log in run.logs() if "worker" in log.stem]
        assert counts == [1, 1]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [
        ["cluster=1ps2w", "train.jit=true"],
        ["cluster=2w", "strategy=all_reduce"],
        ["cluster=1ps2w", "strategy=async"],
        ["cluster=1ps2w", "strategy=async", "optimizer.clip_norm=0.5"],
        ["cluster=1ps2w", "strategy=backup", "strategy.quorum=1"],
        ["cluster=local", "device.replicas=[/cpu:0,/cpu:1]"],
        ["cluster=local", "train.precision=mixed_float16"],
    ],
    ids=lambda options: "-".join(o.partition("=")[2] for o in options),
)
def test_every_strategy_skips_bad_updates(finish: Finish, fragile, options):
    """Enough examples are bad for every replica to get some, whichever updates it makes."""
    at = f"data.options.at={list(range(0, COUNT, 30))}"
    run = finish(*options, *fragile, at, "model.options.loss=true", "train.on_not_finite=skip", "train.steps=30")
    assert is_finite(run)
    assert "training continues" in "".join(log.read_text() for log in run.logs())
    losses = [line["loss"] for line in run.history()]
    assert np.isfinite(losses).all()


@pytest.mark.long
@pytest.mark.cluster
def test_a_skipped_update_changes_nothing(finish: Finish, fragile):
    run = finish("cluster=1ps2w", *fragile, "train.on_not_finite=skip", "checkpoint.every=1", "checkpoint.keep=12")
    states = {
        int(path.name): checkpoint.load(checkpoint.read_manifest(path))
        for path in (run.directory / "checkpoints").iterdir()
    }
    same = [
        step
        for step in range(2, STEPS + 1)
        if all((states[step][n] == states[step - 1][n]).all() for n in states[step])
    ]
    assert same == [7]


@pytest.mark.long(but=["one"])
@pytest.mark.cluster
@pytest.mark.parametrize("clusters", [CLUSTERS, ("local",)], ids=["two", "one"])
def test_a_run_goes_back_to_its_newest_checkpoint_and_continues_with_other_batches(finish: Finish, fragile, clusters):
    ahead = [indices_at(step, seed=order_seed(SEED, 1)) for step in range(6, STEPS)]
    assert indices_at(6, replica=1, replicas=2)[0] not in np.concatenate(ahead), "choose another seed"
    options = [*fragile, "train.on_not_finite=rollback", "restart.delay_secs=0", "checkpoint.every=1"]
    runs = [finish(f"cluster={name}", *options, f"run={name}") for name in clusters]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1
    for run in runs:
        assert (run.directory / "rollbacks.jsonl").read_text() == '{"step": 7, "checkpoint": 6}\n'
        assert "resuming at step 6" in (run.directory / "logs/worker-0.log").read_text()
        assert (run.summary()["steps"], is_finite(run)) == (STEPS, True)


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_that_is_bad_after_every_rollback_stops(start, fragile):
    options = [*fragile, "train.on_not_finite=rollback", "restart.delay_secs=0"]
    run = start("cluster=1ps2w", *options, f"data.options.at={list(range(COUNT))}")
    assert run.wait() == 65, run.output
    assert count_rollbacks(run.directory / "rollbacks.jsonl") == 3
    assert not list((run.directory / "checkpoints").glob("0*"))
