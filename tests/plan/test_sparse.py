"""Sparse layers: what a run with them cannot have, and what a plan says of them."""

from __future__ import annotations

import itertools

import pytest
from quick_config import load

from trainer.faults.problems import Problem
from trainer.plan import resolve, validate
from trainer.plan.checks.sparse import check_patterns
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.plan.tables import FirstValues, Growing, SparsePattern, Table, sparse_patterns

MACHINE = Machine(cores=4, gpus=0, memory_bytes=2**30)
SPARSE = ["placement.sparse=[user]", "cluster=2ps2w", "optimizer=adagrad"]


def problems(*overrides: str) -> list[Problem]:
    config, _ = resolve.resolve(load([*SPARSE, *overrides]), {})
    return validate.validate(config, MACHINE)


@pytest.mark.parametrize(
    ("override", "codes"),
    [
        ("strategy=all_reduce", "placement.sparse/not-supported strategy/conflict"),
        ("optimizer.ema=0.9", "optimizer.ema/not-supported"),
        ("optimizer=lamb", "optimizer.name/not-supported"),
        ("placement.buckets=2", "placement.buckets/not-supported"),
        ("optimizer.groups=[{match: a, learning_rate: 1}]", "optimizer.groups/not-supported"),
    ],
)
def test_what_sparse_layers_cannot_have_is_a_problem(refused, override, codes):
    refused(codes, problems, override)


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


@pytest.mark.parametrize("description", [described(10**9), described(10**7, growing=Growing(1, None))])
def test_a_model_that_does_not_fit_is_a_problem(refused, description):
    refused("placement.sparse/over-capacity", make_plan, load(SPARSE), description, MACHINE)


@pytest.mark.parametrize(
    ("options", "layers", "codes"),
    [
        (["placement.sparse=[user]"], ["item"], "placement.sparse/no-match"),
        (["placement.growing={user:9}"], ["use"], "placement.growing/no-match"),
        (["placement.growing={user:9}"], [], "placement.growing/no-match"),
    ],
)
def test_a_pattern_that_matches_no_layer_is_a_problem(refused, options, layers, codes):
    refused(codes, check_patterns, sparse_patterns(load(options).placement), layers)


def test_the_first_pattern_that_matches_a_layer_counts():
    options = ["placement.sparse=['*']", "placement.growing={user:9,item:7}", "placement.min_count={item:2}"]
    user, item, rest = sparse_patterns(load(options).placement)
    assert user == SparsePattern("user", 9, Growing(1, None))
    assert item == SparsePattern("item", 7, Growing(2, None))
    assert rest == SparsePattern("*")


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        (["placement.growing={user:0}"], "placement.growing/out-of-range"),
        (["placement.min_count={item:2}"], "placement.min_count/no-match"),
        (["placement.max_age={user:-1}"], "placement.max_age/out-of-range"),
        (["strategy=all_reduce"], "placement.growing/not-supported strategy/conflict"),
    ],
)
def test_what_layers_that_grow_cannot_have_is_a_problem(refused, options, codes):
    config = load(["cluster=2ps2w", "optimizer=adagrad", "placement.growing={user:9}", *options])
    config, _ = resolve.resolve(config, {})
    refused(codes, validate.validate, config, MACHINE)


@pytest.mark.parametrize(("rows", "lookups", "is_named"), [(10**6, 1, True), (10**6, 1000, False), (1000, 1, False)])
def test_a_large_dense_embedding_of_which_few_rows_are_touched_is_named(rows, lookups, is_named, snapshot):
    dense = Parameter("user/embeddings", (rows, 16), True)
    description = Description((dense,), 2, 8000, 2000, lookups={"user": lookups})
    plan = make_plan(load(["cluster=1ps2w"]), description, MACHINE)
    warnings = [str(one) for one in plan.warnings if one.key == "placement.sparse"]
    assert bool(warnings) == is_named
    if is_named:
        assert warnings[0] == snapshot
        assert "type 'placement.sparse=[user]'" in warnings[0]
