"""Which shard holds which parameter."""

from __future__ import annotations

import pytest

from trainer.placement import LANES, Parameter, place

PS = ("ps:0", "ps:1")


def parameters(**sizes: int) -> list[Parameter]:
    return [Parameter(path, (size,), trainable=True) for path, size in sizes.items()]


def held(shards) -> list[list[str]]:
    return [[piece.path for piece in (*shard.trainable, *shard.state)] for shard in shards]


def test_bytes_balance_when_the_big_table_comes_last():
    assert held(place(parameters(a=32, b=32, table=64), PS, pins={})) == [["table"], ["a", "b"]]


def test_round_robin_goes_through_the_shards_in_creation_order():
    placed = place(parameters(a=64, b=16, c=16, d=16), PS, pins={}, strategy="round_robin")
    assert held(placed) == [["a", "c"], ["b", "d"]]


def test_a_pin_wins_over_the_strategy():
    assert held(place(parameters(a=32, b=32, table=64), PS, pins={"table": 1})) == [["a", "b"], ["table"]]


def test_of_two_matching_pins_the_more_literal_one_wins():
    placed = place(parameters(dense0=16, dense1=16), PS, pins={"dense*": 0, "dense1": 1})
    assert held(placed) == [["dense0"], ["dense1"]]


def test_a_pin_that_matches_nothing_names_the_nearest_parameters():
    with pytest.raises(ValueError, match="pin 'dense/kernal' matches no parameter; the nearest are dense/kernel"):
        place([Parameter("dense/kernel", (4,), True)], PS, pins={"dense/kernal": 0})


def test_a_pin_to_a_shard_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"pin 'a' names shard 2; there are shards 0\.\.1"):
        place(parameters(a=16), PS, pins={"a": 2})


def test_every_parameter_starts_at_64_bytes_and_state_follows_what_is_trained():
    mixed = [Parameter("bn/mean", (3,), False), Parameter("w", (2, 9), True), Parameter("b", (1,), True)]
    (shard,) = place(mixed, ["ps:0"], pins={})
    assert [(p.path, p.offset, p.size, p.padded) for p in shard.trainable] == [("w", 0, 18, 32), ("b", 32, 1, 16)]
    assert [(p.path, p.offset) for p in shard.state] == [("bn/mean", 48)]
    assert (shard.trainable_size, shard.metrics_offset, shard.header_offset, shard.size) == (48, 64, 80, 96)


def test_more_shards_than_parameters_leaves_some_empty():
    empty = place(parameters(a=16), ["ps:0", "ps:1", "ps:2"], pins={})[2]
    assert (empty.trainable, empty.trainable_size, empty.size) == ((), 0, 2 * LANES)
