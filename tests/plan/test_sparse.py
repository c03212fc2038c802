"""Sparse layers: what a run with them cannot have, and what a plan says of them."""

from __future__ import annotations

import itertools

import pytest
from quick_config import load

from trainer.faults.problems import ConfigError
from trainer.plan import resolve, validate
from trainer.plan.checks.sparse import check_patterns
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.plan.tables import FirstValues, Growing, SparsePattern, Table, sparse_patterns

MACHINE = Machine(cores=4, gpus=0, memory_bytes=2**30)
SPARSE = ["placement.sparse=[user]", "cluster=2ps2w", "optimizer=adagrad"]


def problems(*overrides: str) -> list[str]:
    config = load([*SPARSE, *overrides])
    resolve.resolve(config, {})
    return [str(one) for one in validate.validate(config, MACHINE)]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("strategy=all_reduce", "rows of sparse layers are held by shard hosts, which all_reduce does not have"),
        ("optimizer.ema=0.9", "optimizer.ema: is not available with sparse layers"),
        ("optimizer=lamb", "optimizer.name: is not available with sparse layers"),
        ("placement.buckets=2", "placement.buckets: is not available with sparse layers"),
        ("optimizer.groups=[{match: a, learning_rate: 1}]", "optimizer.groups: is not available with sparse layers"),
    ],
)
def test_what_sparse_layers_cannot_have_is_a_problem(override, says):
    assert any(says in problem for problem in problems(override)), problems(override)


def test_every_strategy_with_hosts_and_one_process_can_have_them():
    assert problems("optimizer.clip_norm=1") == []
    assert problems("strategy=async", "optimizer.clip_norm=1", "strategy.max_staleness=3") == []
    assert problems("strategy=backup", "strategy.quorum=1") == []
    assert problems("cluster=local") == []
    assert problems("strategy.wire=float32") == []


def described(rows: int, growing: Growing | None = None, **options: object) -> Description:
    table = Table("user/embeddings", rows, 16, FirstValues(-0.05, 0.05), 3, growing)
    parameters = (Parameter("dense/kernel", (16, 2), True),)
    return Description(parameters, 2, 8000, 2000, **{"tables": (table,), "lookups": {"user": 3}, **options})


def test_a_plan_knows_what_lies_where():
    plan = make_plan(load([*SPARSE, "train.batch_size=64"]), described(1001), MACHINE)
    layout = plan.table_layout
    (block,) = layout.blocks
    assert (plan.wire, block.hosts, block.held, layout.slots) == ("memory", 2, 501, ("accumulator",))
    sizes = {region.name: region.shape for region in layout.regions()}
    assert sizes["rows"] == sizes["slots/accumulator"] == (1002, 16)
    assert sizes["pushed_places"] == (2, 96)
    assert sizes["before_rows"] == (2, 192, 16)
    offsets = [(region.offset, region.offset + region.nbytes) for region in layout.regions()]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(offsets))
    assert offsets[-1][1] == layout.nbytes
    assert make_plan(load([*SPARSE, "strategy.wire=float32"]), described(1001), MACHINE).wire == "float32"


@pytest.mark.parametrize(
    ("description", "says"),
    [
        (described(10**9), r"1,000,000,000 rows with their slots take \d+\.\d+ GiB, and this machine has 1\.00 GiB"),
        (
            described(10**7, growing=Growing(1, None)),
            r"10,000,000 rows with their slots take 1\.\d+ GiB, and this machine has 1\.00 GiB",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_a_problem(description, says):
    with pytest.raises(ConfigError, match=says):
        make_plan(load(SPARSE), description, MACHINE)


@pytest.mark.parametrize(
    ("options", "layers", "says"),
    [
        (
            ["placement.sparse=[user]"],
            ["item"],
            "placement.sparse: 'user' matches no Embedding layer; the model has item",
        ),
        (["placement.growing={user:9}"], ["use"], "e.g. 'placement.growing={use:9}'"),
        (["placement.growing={user:9}"], [], "placement.growing: the model has no Embedding layer"),
    ],
)
def test_a_pattern_that_matches_no_layer_is_a_problem(options, layers, says):
    (problem,) = check_patterns(sparse_patterns(load(options).placement), layers)
    assert says in str(problem)


def test_the_first_pattern_that_matches_a_layer_counts():
    options = ["placement.sparse=['*']", "placement.growing={user:9,item:7}", "placement.min_count={item:2}"]
    user, item, rest = sparse_patterns(load(options).placement)
    assert user == SparsePattern("user", 9, Growing(1, None))
    assert item == SparsePattern("item", 7, Growing(2, None))
    assert rest == SparsePattern("*")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["placement.growing={user:0}"], "placement.growing: user has 0"),
        (["placement.min_count={item:2}"], "'item' is not in placement.growing, which has user"),
        (["placement.max_age={user:-1}"], "placement.max_age: user has -1"),
        (["strategy=all_reduce"], "placement.growing: rows of sparse layers are held by shard hosts"),
    ],
)
def test_what_layers_that_grow_cannot_have_is_a_problem(options, says):
    growing = ["placement.growing={user:9}", *options]
    config = load(["cluster=2ps2w", "optimizer=adagrad", *growing])
    resolve.resolve(config, {})
    found = [str(one) for one in validate.validate(config, MACHINE)]
    assert any(says in problem for problem in found), found


@pytest.mark.parametrize(("rows", "lookups", "is_named"), [(10**6, 1, True), (10**6, 1000, False), (1000, 1, False)])
def test_a_large_dense_embedding_of_which_few_rows_are_touched_is_named(rows, lookups, is_named):
    dense = Parameter("user/embeddings", (rows, 16), True)
    description = Description((dense,), 2, 8000, 2000, lookups={"user": lookups})
    plan = make_plan(load(["cluster=1ps2w"]), description, MACHINE)
    warnings = [str(one) for one in plan.warnings if one.key == "placement.sparse"]
    assert bool(warnings) == is_named
    if is_named:
        assert "user has 1,000,000 rows (61.0 MiB), and a step touches at most 256 of them but moves all" in warnings[0]
        assert "type 'placement.sparse=[user]'" in warnings[0]
