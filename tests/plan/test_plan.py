"""From a config to a plan, without TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from quick_config import load, validated_on
from snapshots import cases

from trainer.faults.problems import ConfigError
from trainer.plan import page
from trainer.plan.description import CompiledOptimizer, Description, LeftOut
from trainer.plan.devices import Machine
from trainer.plan.layout import FrozenWeights, Parameter
from trainer.plan.make import make_plan
from trainer.plan.plan import Group, Plan
from trainer.plan.resolve import resolve_optimizer, resolve_steps

MACHINE = Machine(cores=8, gpus=0)
MODEL = Description(
    (Parameter("dense/kernel", (784, 128), True), Parameter("dense/bias", (128,), True)),
    10,
    8000,
    2000,
    layers=("flatten", "dense"),
    metrics=("accuracy",),
)


def planned(*overrides: str, model: Description = MODEL, machine: Machine = MACHINE) -> Plan:
    return make_plan(load(list(overrides), validated_on(machine)), model, machine)


def test_a_cluster_has_its_tasks_in_order_and_worker_0_is_the_chief():
    plan = planned("cluster=2ps4w")
    assert [task.name for task in plan.tasks] == ["ps:0", "ps:1", "worker:0", "worker:1", "worker:2", "worker:3"]
    assert [task.name for task in plan.tasks if task.is_chief] == ["worker:0"]


def test_parameters_live_on_the_ps_if_there_are_any():
    assert [shard.host for shard in planned("cluster=2ps4w").shards] == ["ps:0", "ps:1"]


def test_parameters_live_on_the_workers_if_there_is_no_ps():
    assert [shard.host for shard in planned("cluster=2w").shards] == ["worker:0", "worker:1"]


def test_one_process_trains_locally_and_a_cluster_synchronously():
    assert (planned().strategy, planned("cluster=1w").strategy) == ("local", "sync")


def test_workers_of_one_machine_share_its_cores():
    threads = {task.name: task.intra_op_threads for task in planned("cluster=1ps4w").tasks}
    assert threads == {"ps:0": 8, "worker:0": 2, "worker:1": 2, "worker:2": 2, "worker:3": 2}


def test_the_batch_is_global_and_divided_among_replicas():
    plan = planned("cluster=1ps4w", "train.batch_size=256")
    assert (plan.global_batch, plan.replica_batch) == (256, 64)


def test_a_link_carries_a_shard_there_and_back_each_step():
    plan = planned("cluster=1ps2w", "strategy=sync", "strategy.wire=float32")
    shard = 4 * (784 * 128 + 128 + 16 + 16)
    assert plan.link_nbytes() == {"worker:0 - ps:0": 2 * shard, "worker:1 - ps:0": 2 * shard}


def test_a_worker_that_holds_a_shard_sends_it_nothing():
    assert "worker:0 - worker:0" not in planned("cluster=2w").link_nbytes()


def test_a_plan_survives_being_written_and_read():
    plan = planned("cluster=2ps2w")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_with_devices_survives_being_written_and_read():
    gpus = ["+device.gpus={worker:[0,1]}", "+device.memory_mib={worker:900}", "device.replicas=[/gpu:0,/gpu:1]"]
    plan = planned("cluster=1ps2w", *gpus, machine=Machine(cores=8, gpus=2, gpu_mib=(8000, 8000)))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.replicas == 4


# What is typed, by the codes of its problems.
BAD = {
    "cluster/out-of-range": ["cluster=2ps4w2e"],
    "device.layers/no-match": ["+device.layers.dens=/cpu:1"],
    "optimizer.groups/no-match": ["optimizer.groups=[{match:dens/*,weight_decay:0}]"],
    "optimizer.momentum/no-effect": ["optimizer=adam optimizer.momentum=0.5"],
    "optimizer.schedule.warmup_steps/no-effect": ["optimizer=adam optimizer.schedule.warmup_steps=5"],
    "placement.buckets/no-effect": ["cluster=local placement.buckets=2"],
    "placement.buckets/not-supported": [
        "strategy=async cluster=2w placement.buckets=2",
        "cluster=2w placement.buckets=2 device.log_placement=true",
    ],
    "placement.pins/no-match": ["cluster=1ps2w placement.pins={conv/*:0}"],
    "strategy.max_staleness/no-effect": [
        "cluster=4w strategy.max_staleness=3",
        "strategy=sync cluster=4w strategy.max_staleness=3",
    ],
    "strategy.pack_mib/no-effect": ["strategy=sync cluster=4w strategy.pack_mib=3"],
    "strategy.quorum/no-effect": ["cluster=1ps4w strategy.quorum=3"],
    "strategy.quorum/not-set": ["strategy=backup cluster=4w"],
    "strategy.quorum/out-of-range": [
        "strategy=backup cluster=4w strategy.quorum=5",
        "strategy=backup cluster=4w strategy.quorum=0",
    ],
    "strategy.quorum/out-of-range train.batch_size/not-divisible train.steps/out-of-range": [
        "cluster=2ps4w train.batch_size=255 strategy.quorum=9 train.steps=-1"
    ],
    "strategy.wire/no-effect": [
        "cluster=local strategy.wire=bfloat16",
        "strategy=all_reduce cluster=2w strategy.wire=bfloat16",
    ],
    "strategy/conflict": [
        "strategy=sync",
        "cluster=1ps2w strategy=local",
        "strategy=async",
        "strategy=all_reduce",
        "strategy=all_reduce cluster=2ps4w",
        "strategy=local cluster=4w",
    ],
    "train.batch_size/not-divisible": [
        "cluster=2ps4w train.batch_size=255",
        "cluster=2w device.replicas=[/cpu:0,/cpu:1] train.accumulate=3",
    ],
    "train.replicas/not-divisible": [
        "cluster=1ps3w strategy=async train.replicas=4 train.batch_size=12",
        "cluster=3w strategy=all_reduce train.replicas=4 train.batch_size=12",
    ],
    "train.replicas/out-of-range": ["cluster=2ps4w train.replicas=2"],
    "train.batch_size/over-capacity": ["cluster=2ps4w train.batch_size=8008"],
}


@pytest.mark.parametrize(("codes", "typed"), cases(BAD))
def test_what_cannot_be_planned_is_refused(refused, codes, typed):
    refused(codes, planned, *typed.split())


def test_a_plan_warns_of_shares_that_are_not_equal(snapshot):
    plan = planned("cluster=1ps3w", "train.replicas=8")
    assert [str(warning) for warning in plan.warnings if warning.key == "train.replicas"] == snapshot
    assert [w for w in planned("cluster=1ps4w", "train.replicas=8").warnings if w.key == "train.replicas"] == []


def test_a_model_with_a_batch_size_of_its_own_gets_batches_of_it(snapshot):
    fixed = replace(MODEL, model_batch=8)
    assert planned("cluster=1ps2w", "train.batch_size=16", "evaluate.batch_size=8", model=fixed)
    with pytest.raises(ConfigError) as raised:
        planned("cluster=1ps2w", "train.batch_size=48", model=replace(fixed, evaluate_examples=2001))
    assert [(problem.key, problem.remedy) for problem in raised.value.problems] == [
        ("train.batch_size", "type train.batch_size=16"),
        ("evaluate.batch_size", "type evaluate.batch_size=8"),
        ("data.name", "leave 1 of them out"),
    ]
    assert str(raised.value) == snapshot


@pytest.mark.parametrize("quorum", ["0", "5"])
def test_a_quorum_that_cannot_be_met_is_refused(quorum, refused):
    refused("strategy.quorum/out-of-range", planned, "cluster=1ps4w", f"strategy.quorum={quorum}")


def test_a_quorum_may_be_all():
    assert planned("cluster=1ps4w", "strategy=backup", "strategy.quorum=4").quorum == 4


def test_a_quorum_counts_the_replicas_that_a_worker_sends_at_once(refused):
    two_each = ["strategy=backup", "cluster=1ps2w", "device.replicas=[/cpu:0,/cpu:1]"]
    assert planned(*two_each, "strategy.quorum=2").quorum == 2
    refused("strategy.quorum/not-divisible", planned, *two_each, "strategy.quorum=3")


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster=1ps2w"],
        ["cluster=2ps4w", "strategy=async"],
        ["cluster=4w", "strategy=backup", "strategy.quorum=3"],
        ["cluster=4w", "strategy=all_reduce"],
        ["device.replicas=[/cpu:0,/cpu:1]"],
    ],
)
def test_the_first_line_says_what_the_strategy_means(overrides, snapshot):
    assert planned(*overrides).describe() == snapshot


@pytest.mark.parametrize(
    ("overrides", "examples"),
    [
        (["cluster=4w"], 256),
        (["cluster=4w", "strategy=all_reduce"], 256),
        (["cluster=4w", "strategy=async"], 64),
        (["cluster=4w", "strategy=backup", "strategy.quorum=3"], 192),
        (["device.replicas=[/cpu:0,/cpu:1]"], 256),
    ],
)
def test_the_examples_of_an_update_depend_on_the_strategy(overrides, examples):
    assert planned(*overrides).update_batch == examples


def test_an_evaluator_is_not_part_of_the_cluster_that_trains():
    plan = planned("cluster=1ps2w1e")
    assert sorted(plan.jobs()) == ["ps", "worker"]
    assert [task.name for task in plan.trainers] == ["ps:0", "worker:0", "worker:1"]
    assert plan.tasks[-1].name == "evaluator:0"


def test_every_bad_pin_is_refused_with_a_valid_one():
    with pytest.raises(ConfigError) as raised:
        planned("cluster=2ps2w", "placement.pins={dens/kernel:1,dense/bias:2,bias:-1}", "device.layers={flaten:/cpu:3}")
    assert [(problem.key, problem.remedy) for problem in raised.value.problems] == [
        ("device.layers", "e.g. 'device.layers={flatten:/cpu:3}'"),
        ("placement.pins", "e.g. 'placement.pins={dense/kernel:1}'"),
        ("placement.pins", "e.g. 'placement.pins={dense/bias:1}'"),
        ("placement.pins", "e.g. 'placement.pins={dense/bias:0}'"),
        ("placement.pins", "e.g. 'placement.pins={dense/bias:0}'"),
    ]
    assert "pin 'dense/bias' names shard 2; available: shards 0..1" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["cluster.worker=4"], "type cluster=4w"),
        (["cluster=2ps4w", "cluster.ps=0"], "type cluster=4w"),
        (["cluster=2ps4w", "cluster.evaluator=1"], "type cluster=2ps4w1e"),
    ],
)
def test_a_size_and_a_count_that_contradict_each_other_are_one_problem(overrides, remedy):
    with pytest.raises(ConfigError, match="contradict each other") as raised:
        planned(*overrides)
    assert [(problem.key, problem.remedy) for problem in raised.value.problems] == [("cluster", remedy)]


def test_a_layer_that_has_adapted_to_nothing_gets_a_warning(snapshot):
    assert planned(model=replace(MODEL, not_adapted=("age",))).warnings == snapshot


def test_a_sum_over_examples_gets_a_warning_where_replicas_are_averaged():
    summed = replace(MODEL, is_summed=True)
    for override, parts in (("cluster=1ps2w", 2), ("train.accumulate=4", 4), ("seed=1", 1)):
        plan = planned(override, model=summed)
        assert [f"{parts} parts" in one.message for one in plan.warnings if one.key == "model"] == [True] * (parts > 1)


def test_what_mixes_the_examples_of_a_batch_is_said_where_it_is_computed_in_parts():
    mixing = replace(MODEL, mixing=("layer centered",))
    for override, parts in (("cluster=1ps2w", 2), ("train.accumulate=4", 4), ("seed=1", 1)):
        warnings = planned(override, model=mixing).warnings
        said = [
            "layer centered" in one.message and f"{parts} parts" in one.message
            for one in warnings
            if one.key == "model"
        ]
        assert said == [True] * (parts > 1)


def test_parameters_that_the_loss_does_not_reach_are_known_to_every_shard_and_said():
    reached = planned("cluster=2ps2w")
    path = reached.shards[0].trainable[0].path
    plan = planned("cluster=2ps2w", model=replace(MODEL, unreached=(path,)))
    assert [shard.unreached for shard in plan.shards] == [(path,)] * 2
    assert [path in warning.message for warning in plan.warnings if warning.key == "model"] == [True]
    assert not any(warning.key == "model" for warning in reached.warnings)


@pytest.mark.parametrize("cluster", ["cluster=1ps2w", "cluster=2w", "cluster=2w strategy=all_reduce"])
def test_layers_that_talk_to_other_replicas_are_refused_where_there_are_some(cluster):
    model = replace(MODEL, exchanging=("layer norm",))
    assert planned(model=model).shards
    assert planned("train.accumulate=2", model=model).shards
    with pytest.raises(ConfigError) as raised:
        planned(*cluster.split(), model=model)
    (problem,) = raised.value.problems
    assert (problem.key, "layer norm" in problem.message) == ("cluster", True)


def test_a_shard_without_parameters_gets_a_warning():
    plan = planned("cluster=3ps2w", "placement.max_part_mib=null")
    assert any("ps:2 holds no parameter" in str(warning) for warning in plan.warnings)


def test_more_workers_than_cores_get_a_warning():
    warnings = planned("cluster=1ps4w", machine=Machine(cores=2, gpus=0)).warnings
    assert any("4 workers share 2 cores" in str(warning) for warning in warnings)


SCHEDULED = {"learning_rate": 0.1, "schedule": {"name": "cosine", "decay_steps": 50}, "momentum": 0.9, "clip_norm": 2.0}
BY_CONFIG, BY_DEFAULT = "sgd, learning rate 0.5, from the config", "adam, learning rate 0.001, by default"


def with_own_optimizer(name: str, settings: dict[str, Any], *left_out: LeftOut) -> Description:
    return replace(MODEL, compiled_optimizer=CompiledOptimizer(name, settings, left_out))


CLIPPED = LeftOut("clipvalue=0.5", "clip_norm", "type optimizer.clip_norm=1")


@pytest.mark.parametrize(
    ("model", "typed"),
    [
        (MODEL, ""),
        (with_own_optimizer("sgd", SCHEDULED), "optimizer=sgd optimizer.learning_rate=0.5"),
        (with_own_optimizer("sgd", SCHEDULED), ""),
        (
            with_own_optimizer("sgd", SCHEDULED, CLIPPED),
            "optimizer.learning_rate=0.001 optimizer.clip_norm=null optimizer.schedule.name=constant",
        ),
        (with_own_optimizer("nadam", {}, CLIPPED), "optimizer=sgd optimizer.learning_rate=0.5"),
    ],
)
def test_the_plan_says_where_the_optimizer_comes_from(model, typed, snapshot):
    config = load(typed.split())
    optimizer, problems = resolve_optimizer(config.optimizer, config.given, model.compiled_optimizer)
    assert not problems
    config = replace(config, optimizer=optimizer)
    assert make_plan(config, model, MACHINE).optimizer == snapshot


@pytest.mark.parametrize(("optimizer", "says_more"), [("adam", True), ("sgd", False)])
def test_the_plan_says_that_gradients_of_an_id_are_summed_first(optimizer, says_more):
    config = load([f"optimizer={optimizer}"])
    without = make_plan(config, MODEL, MACHINE).optimizer
    assert (make_plan(config, replace(MODEL, lookups={"embedding": 1}), MACHINE).optimizer != without) is says_more


def test_what_compile_has_and_the_config_has_not_is_refused():
    config = load(["optimizer.learning_rate=0.1"])
    model = with_own_optimizer("sgd", SCHEDULED, CLIPPED)
    _, problems = resolve_optimizer(config.optimizer, config.given, model.compiled_optimizer)
    assert [problem.key for problem in problems] == ["optimizer.clip_norm"]


@pytest.mark.parametrize(
    ("epochs", "examples", "batch", "steps", "said"),
    [
        (5, 8000, 256, 157, "5 epochs of 8,000 examples and 192 of the next"),
        (1, 8000, 256, 32, "1 epoch of 8,000 examples and 192 of the next"),
        (4, 8000, 256, 125, "4 epochs of 8,000 examples\n"),
        (1, 256, 256, 1, "1 epoch of 256 examples\n"),
        (3, 257, 256, 4, "3 epochs of 257 examples and 253 of the next"),
    ],
)
def test_epochs_become_steps_when_the_examples_are_counted(epochs, examples, batch, steps, said, capsys):
    config = load([f"train.epochs={epochs}", f"train.batch_size={batch}"])
    train, problems = resolve_steps(config.train, examples)
    assert not problems
    config = replace(config, train=train)
    plan = make_plan(config, replace(MODEL, train_examples=examples), MACHINE)
    assert (config.train.steps, plan.steps, plan.epochs) == (steps, steps, epochs)
    page.show(plan)
    assert f"steps: {steps}, {said}" in capsys.readouterr().out


def test_an_epoch_of_workers_that_wait_for_nobody_has_all_examples(capsys):
    config = load(["train.epochs=2", "train.batch_size=256", "cluster=1ps4w", "strategy=async"])
    train, problems = resolve_steps(config.train, 8000, updates_of_batch=4)  # updates of 64 examples each
    assert not problems
    config = replace(config, train=train)
    plan = make_plan(config, replace(MODEL, train_examples=8000), MACHINE)
    assert (plan.steps, plan.epoch_steps) == (250, 125)
    page.show(plan)
    assert "steps: 250, 2 epochs of 8,000 examples\n" in capsys.readouterr().out


def test_a_stream_has_no_epochs():
    train = load(["train.epochs=5"]).train
    assert [problem.key for problem in resolve_steps(train, 0)[1]] == ["train.epochs"]


def test_the_keys_of_the_config_must_fit_the_optimizer_of_the_model(snapshot):
    config, model = load(["optimizer.momentum=0.9"]), with_own_optimizer("lion", {"beta_2": 1.5})
    _, problems = resolve_optimizer(config.optimizer, config.given, model.compiled_optimizer)
    assert [str(problem).partition(";")[0] for problem in problems] == snapshot


def test_the_plan_says_which_group_a_parameter_is_in():
    groups = "{match:[*/bias,table],weight_decay:0},{match:dense/*,learning_rate:0.01},{match:table,frozen:true}"
    frozen = FrozenWeights(("table", "norm/mean"), 4, "0")  # by the config, and by the layer itself
    plan = planned(f"optimizer.groups=[{groups}]", "optimizer=adamw", model=replace(MODEL, frozen=frozen))
    assert plan.groups == (
        Group("learning rate 0.01, weight decay 0.004", ("dense/kernel",)),
        Group("learning rate 0.01, weight decay 0", ("dense/bias",)),
        Group("frozen", ("table",)),
    )
    assert planned("optimizer=adamw").groups == ()


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_an_optimizer_that_measures_parameters_gets_them_whole(name, refused):
    def has_parts(*overrides: str) -> bool:
        return any(piece.is_part for shard in planned("cluster=2ps4w", *overrides).shards for piece in shard.trainable)

    assert (has_parts("optimizer=adam"), has_parts(f"optimizer={name}")) == (True, False)
    refused("placement.max_part_mib/not-supported", planned, f"optimizer={name}", "placement.max_part_mib=1")


def test_replicas_of_one_worker_cannot_share_a_pass_over_the_data():
    with pytest.raises(ConfigError, match=r"device.replicas: .*tf.data.Dataset.*\n.*return a function \(context\)"):
        planned("cluster=1ps1w", "device.replicas=[/cpu:0,/cpu:1]", model=replace(MODEL, is_divided=True))


def test_deciding_and_launching_import_no_tensorflow():
    modules = (
        "trainer.__main__, trainer.commands.command, trainer.plan.addresses, trainer.plan.checks.capacity, "
        "trainer.config.cluster_size, trainer.config.schema, "
        "trainer.plan.description, trainer.plan.checks.devices, trainer.plan.devices, "
        "trainer.plan.checks.gpu_memory, trainer.observe.machine, "
        "trainer.plan.placement, trainer.plan.plan, trainer.plan.page, trainer.launch.processes.launcher, "
        "trainer.launch.processes.tasks, trainer.launch.processes.nursery"
    )
    code = f"import sys, {modules}; assert not {{'tensorflow', 'keras'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bfloat16_wire_halves_what_crosses_a_link():
    exact, rounded = (planned("cluster=1ps2w", f"strategy.wire={wire}") for wire in ("float32", "bfloat16"))
    rest = 4 * (exact.shards[0].size - exact.shards[0].trainable_size)
    for link, nbytes in exact.link_nbytes().items():
        assert rounded.link_nbytes()[link] - 2 * rest == (nbytes - 2 * rest) / 2


@pytest.mark.parametrize("strategy", ["sync", "async", "backup"])
def test_on_one_machine_vectors_stay_in_memory_and_only_short_messages_are_sent(strategy):
    plan = planned("cluster=1ps2w", f"strategy={strategy}", *(["strategy.quorum=1"] if strategy == "backup" else []))
    assert plan.wire == "memory"
    assert plan.link_nbytes() == {"worker:0 - ps:0": 24, "worker:1 - ps:0": 24}


def test_small_vectors_are_sent_because_that_is_faster_unless_memory_is_asked_for():
    wires = {}
    for rows in (65, 66):  # 254 and 258 KiB
        model = dataclasses.replace(MODEL, parameters=(Parameter("dense/kernel", (rows, 1000), True),))
        wires[rows] = planned("cluster=1ps2w", model=model).wire
        assert planned("cluster=1ps2w", "strategy=sync", "strategy.wire=memory", model=model).wire == "memory"
    assert wires == {65: "float32", 66: "memory"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["launch=docker"],
        ["device.log_placement=true"],
        ["cluster.addresses={ps:['10.0.0.1:2222'],worker:['10.0.0.2:2222','10.0.0.3:2222']}"],
    ],
)
def test_vectors_are_sent_if_tasks_cannot_share_memory(overrides, refused):
    assert planned("cluster=1ps2w", *overrides).wire == "float32"
    refused(
        "strategy.wire/not-available", planned, "cluster=1ps2w", *overrides, "strategy=sync", "strategy.wire=memory"
    )


def test_vectors_are_sent_if_the_size_of_files_is_limited():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**40, hard))
    try:
        assert planned("cluster=1ps2w").wire == "float32"
        with pytest.raises(ConfigError, match=r"is limited \(ulimit -f\)"):
            planned("cluster=1ps2w", "strategy=sync", "strategy.wire=memory")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_buckets_of_a_host_are_one_host_and_one_link():
    parts = "placement.max_part_mib=0.1"
    one, three = (planned("cluster=2ps2w", parts, f"placement.buckets={buckets}") for buckets in (1, 3))
    assert three.hosts == one.hosts == ("ps:0", "ps:1")
    assert len(three.shards) == 4  # of two parts each
    assert three.link_nbytes().keys() == one.link_nbytes().keys()
    assert "shards on 2 ps" in three.describe()
    assert Plan.from_json(json.loads(json.dumps(three.to_json()))) == three


def test_the_best_metric_is_one_that_evaluations_have():
    planned("evaluate.best_metric=accuracy")
    planned("evaluate.best_metric=loss")
    with pytest.raises(ConfigError, match=r"evaluate.best_metric: unknown metric 'acuracy'; available: loss, accuracy"):
        planned("evaluate.best_metric=acuracy")


@pytest.mark.parametrize("cluster", ["local", "1ps1w", "1ps2w", "1ps1w1e"])
def test_a_pipeline_that_writes_files_is_for_one_task(cluster):
    model = replace(MODEL, written=("cache('a')",))
    if cluster in ("local", "1ps1w"):
        assert planned(f"cluster={cluster}", model=model).cluster == cluster
        return
    with pytest.raises(ConfigError) as caught:
        planned(f"cluster={cluster}", model=model)
    assert [problem.key for problem in caught.value.problems] == ["data.name"]


def test_evaluations_between_steps_must_not_change_what_is_trained_on():
    model = replace(MODEL, shares_order=True)
    for typed in (["evaluate.every=0"], ["evaluate.every=5", "cluster=1ps1w1e"]):
        planned(*typed, model=model)
    with pytest.raises(ConfigError, match="evaluate.every"):
        planned("evaluate.every=5", model=model)
