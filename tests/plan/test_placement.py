"""Which shard holds which parameter."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from random import Random

import pytest
from quick_config import load

from trainer.config.schema import AUTO
from trainer.plan import page
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import LANES, Parameter
from trainer.plan.make import make_plan
from trainer.plan.placement import CHOOSERS, cut, place
from trainer.plan.plan import Plan

PS = ("ps:0", "ps:1")


def parameters(**sizes: int) -> list[Parameter]:
    return [Parameter(path, (size,), trainable=True) for path, size in sizes.items()]


def paths(shards) -> list[list[str]]:
    return [[piece.path for piece in (*shard.trainable, *shard.state)] for shard in shards]


def ranges(shards) -> list[list[str]]:
    pieces = [[*shard.trainable, *shard.state] for shard in shards]
    return [
        [f"{piece.path}[{piece.begin}:{piece.begin + piece.size}]" for piece in shard_pieces] for shard_pieces in pieces
    ]


def mib(floats: int) -> float:
    return 4 * floats / 2**20


def test_bytes_balance_when_the_big_table_comes_last():
    assert paths(place(parameters(a=32, b=32, table=64), PS, pins={})) == [["table"], ["a", "b"]]


def test_round_robin_goes_through_the_shards_in_creation_order():
    placed = place(parameters(a=64, b=16, c=16, d=16), PS, pins={}, strategy="round_robin")
    assert paths(placed) == [["a", "c"], ["b", "d"]]


def test_a_pin_wins_over_the_strategy():
    assert paths(place(parameters(a=32, b=32, table=64), PS, pins={"table": 1})) == [["a", "b"], ["table"]]


def test_the_more_literal_of_two_matching_pins_wins():
    placed = place(parameters(dense0=16, dense1=16), PS, pins={"dense*": 0, "dense1": 1})
    assert paths(placed) == [["dense0"], ["dense1"]]


def test_a_pin_that_matches_nothing_names_the_nearest_parameters(raises):
    with raises(ValueError):
        place([Parameter("dense/kernel", (4,), True)], PS, pins={"dense/kernal": 0})


def test_a_pin_to_an_unknown_shard_is_refused(raises):
    with raises(ValueError):
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


@pytest.mark.parametrize(
    ("size", "floats", "sizes"),
    [
        pytest.param(64, 64, [64], id="just fits"),
        pytest.param(65, 64, [48, 17], id="one float more"),
        pytest.param(100, 32, [32, 32, 32, 4], id="the last is the rest"),
        pytest.param(160, 64, [64, 48, 48], id="nearly equal"),
        pytest.param(64, 47, [32, 32], id="a limit between two multiples of 16"),
        pytest.param(33, 1, [16, 16, 1], id="a limit below 16 floats"),
        pytest.param(0, 16, [0], id="nothing to cut"),
    ],
)
def test_a_large_parameter_is_cut_into_as_few_parts_as_fit_the_limit(size, floats, sizes):
    parts = cut(Parameter("table", (size,), True), mib(floats))
    assert [part.size for part in parts] == sizes


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 1023, 1024, 1025])
@pytest.mark.parametrize("floats", [16, 100, 160, 2000])
def test_parts_follow_each_other_and_begin_at_64_bytes(size, floats):
    parts = cut(Parameter("table", (size,), True), mib(floats))
    assert (parts[0].begin, parts[-1].begin + parts[-1].size) == (0, size)
    assert all(after.begin == part.begin + part.size for part, after in pairwise(parts))
    assert [part.begin % LANES for part in parts] == [0] * len(parts)
    assert max(part.padded for part in parts) - min(part.padded for part in parts) <= LANES


def test_a_parameter_in_parts_keeps_its_shape_and_a_whole_one_is_not_a_part():
    parts = [*cut(Parameter("table", (4, 10), True), mib(32)), *cut(Parameter("bias", (), True), mib(32))]
    assert [(p.path, p.shape, p.begin, p.size, p.padded, p.is_part) for p in parts] == [
        ("table", (4, 10), 0, 32, 32, True),
        ("table", (4, 10), 32, 8, 16, True),
        ("bias", (), 0, 1, 16, False),
    ]


def test_parts_are_placed_as_parameters_are():
    placed = place(parameters(a=16, table=96), PS, pins={}, max_part_mib=mib(32))
    assert ranges(placed) == [["table[0:32]", "table[64:96]"], ["a[0:16]", "table[32:64]"]]


def test_round_robin_places_parts_in_turn():
    placed = place(parameters(a=16, table=96), PS, pins={}, strategy="round_robin", max_part_mib=mib(32))
    assert ranges(placed) == [["a[0:16]", "table[32:64]"], ["table[0:32]", "table[64:96]"]]


def test_a_pin_moves_all_parts_of_a_parameter():
    placed = place(parameters(a=16, table=96), PS, pins={"table": 1}, max_part_mib=mib(32))
    assert ranges(placed) == [["a[0:16]"], ["table[0:32]", "table[32:64]", "table[64:96]"]]


def test_state_is_cut_too():
    mixed = [Parameter("mean", (48,), False), Parameter("w", (16,), True)]
    (shard,) = place(mixed, ["ps:0"], pins={}, max_part_mib=mib(32))
    assert [(p.path, p.begin, p.offset) for p in shard.state] == [("mean", 0, 16), ("mean", 32, 48)]


@pytest.mark.parametrize("strategy", ["greedy", "round_robin"])
def test_the_cut_is_the_same_for_any_number_of_shards(strategy):
    def parts(count: int) -> list[str]:
        hosts = [f"ps:{index}" for index in range(count)]
        placed = place(parameters(a=40, table=1000), hosts, pins={}, strategy=strategy, max_part_mib=mib(100))
        return sorted(part for shard in ranges(placed) for part in shard)

    assert parts(1) == parts(2) == parts(3)
    assert len(parts(1)) == 1 + math.ceil(1000 / 96)


BIG = 2**18  # floats in a MiB


def pieces_of(shards) -> list[int]:
    """How many parameters and parts each host holds."""
    return [len([*shard.trainable, *shard.state]) for shard in shards]


def heaviest(shards) -> float:
    """Bytes of the host that holds most, in shares of the mean."""
    held = [sum(piece.nbytes for piece in (*shard.trainable, *shard.state)) for shard in shards]
    return max(held) * len(held) / sum(held)


def largest(shards) -> int:
    return max(piece.padded for shard in shards for piece in shard.trainable)


def automatic(sizes: dict[str, int], hosts: int, **pins: int) -> tuple:
    return place(parameters(**sizes), [f"ps:{i}" for i in range(hosts)], pins=pins, max_part_mib=AUTO)


@pytest.mark.parametrize(
    ("sizes", "hosts", "expected"),
    [
        pytest.param({"table": 4 * BIG}, 1, [1], id="one host"),
        pytest.param({"table": 4 * BIG}, 2, [1, 1], id="halves"),
        pytest.param({"table": 10 * BIG, "bias": 16}, 3, [1, 2, 1], id="thirds"),
        pytest.param({"a": BIG, "b": BIG, "table": 10 * BIG}, 3, [1, 2, 2], id="parts beside whole ones"),
        pytest.param({"a": 4 * BIG, "b": 4 * BIG}, 2, [1, 1], id="balanced already"),
        pytest.param({"a": 22 * BIG, "b": 20 * BIG}, 2, [1, 1], id="balanced enough"),
        pytest.param({"a": 2 * BIG, "b": 2 * BIG, "c": 2 * BIG}, 2, [3, 3], id="three for two hosts"),
        pytest.param({f"p{i}": BIG for i in range(20)}, 3, [7, 7, 6], id="many small ones"),
        pytest.param({"table": 30_000}, 2, [1, 0], id="a small model"),
    ],
)
def test_auto_cuts_into_as_large_parts_as_balance_the_hosts(sizes, hosts, expected):
    assert pieces_of(automatic(sizes, hosts)) == expected


@pytest.mark.parametrize("hosts", [2, 3, 5, 16])
@pytest.mark.parametrize("seed", range(4))
def test_auto_gives_no_host_more_than_its_share_and_a_tenth(hosts, seed):
    random = Random(seed)
    shards = automatic({f"p{i}": int(BIG * 2 ** random.uniform(-14, 4)) for i in range(30)}, hosts)
    assert heaviest(shards) <= 1.1
    assert sum(pieces_of(shards)) <= 30 + 11 * hosts


def test_a_larger_part_than_auto_finds_would_not_balance():
    sizes = {"a": 7 * BIG, "b": 5 * BIG, "c": BIG, "d": 3 * BIG}
    found = largest(automatic(sizes, 3))
    for floats in range(BIG, 7 * BIG + 1, 8 * LANES):
        shards = place(parameters(**sizes), ["ps:0", "ps:1", "ps:2"], pins={}, max_part_mib=mib(floats))
        assert heaviest(shards) > 1.1 or largest(shards) <= found


def test_auto_keeps_parameters_with_a_pin_whole_and_balances_the_others():
    shards = automatic({"pinned": 4 * BIG, "table": 6 * BIG, "bias": 16}, 2, pinned=0)
    assert ranges(shards) == [
        ["pinned[0:1048576]", "table[1179648:1572864]"],
        ["table[0:393216]", "table[393216:786432]", "table[786432:1179648]", "bias[0:16]"],
    ]


def test_auto_puts_nothing_on_a_host_that_pins_made_too_heavy():
    shards = automatic({"pinned": 9 * BIG, "table": 6 * BIG}, 3, pinned=2)
    assert ranges(shards) == [["table[0:786432]"], ["table[786432:1572864]"], ["pinned[0:2359296]"]]


@pytest.mark.parametrize(
    "override", ["placement.name=round_robin", "optimizer.clip_norm=1.0", "placement.max_part_mib=null"]
)
def test_auto_is_off_where_parameters_go_in_turn_and_where_gradients_are_clipped(override):
    (warning,) = imbalance(planned(override, table=10 * BIG))
    assert "ps:0 holds 100% of the bytes" in warning


def test_without_a_word_parameters_are_cut_where_that_balances():
    assert [len(shard.trainable) for shard in planned(table=10 * BIG).shards] == [1, 1, 1]


def test_the_lightest_shard_is_chosen_and_what_was_put_on_one_counts():
    chooser = CHOOSERS["greedy"](3)
    chooser.hold(0, 100)
    assert [chooser.choose(nbytes) for nbytes in (60, 60, 50, 1)] == [1, 2, 1, 2]  # 100 60 0, ... 60, 110 60


def test_round_robin_ignores_bytes():
    chooser = CHOOSERS["round_robin"](3)
    chooser.hold(0, 100)
    assert [chooser.choose(nbytes) for nbytes in (60, 60, 50, 1)] == [0, 1, 2, 0]


def planned(*overrides: str, **sizes: int) -> Plan:
    model = Description(tuple(parameters(**sizes)), 10, 8000, 2000)
    machine = Machine(cores=8, gpus=0)
    return make_plan(load(["cluster=3ps2w", *overrides]), model, machine)


def imbalance(plan: Plan) -> list[str]:
    return [str(warning) for warning in plan.warnings if warning.key == "placement"]


def test_a_plan_warns_of_a_parameter_that_outweighs_all_others_and_says_how_to_cut_it(snapshot):
    sizes = {"a": 2**18, "b": 2**18, "table": 10 * 2**18}  # 1, 1 and 10 MiB: 4 each are even
    (warning,) = imbalance(planned("placement.max_part_mib=null", **sizes))
    assert warning.split("\n") == snapshot


def test_the_remedy_of_the_warning_works():
    sizes = {"a": 2**18, "b": 2**18, "table": 10 * 2**18}
    plan = planned("placement.max_part_mib=4", **sizes)
    assert imbalance(plan) == []
    assert [[round(4 * piece.size / 2**20, 2) for piece in shard.trainable] for shard in plan.shards] == [
        [3.33],
        [1.0, 3.33],
        [1.0, 3.33],
    ]


def test_an_even_share_below_a_mib_has_two_digits(snapshot):
    sizes = {"a": 1000, "b": 1000, "table": 70_000}  # padded: 72,016 floats
    (warning,) = imbalance(planned("placement.max_part_mib=null", **sizes))
    assert warning == snapshot


def test_a_plan_warns_of_a_shard_that_pins_made_heavy(snapshot):
    (warning,) = imbalance(planned("placement.pins={big*:2}", big0=40_000, big1=40_000, a=16, b=16))
    assert warning == snapshot


def test_to_cut_a_parameter_is_no_remedy_where_its_pin_holds_for_all_parts(snapshot):
    (warning,) = imbalance(planned("placement.pins={table:2}", table=100_000, a=16, b=16))
    assert warning == snapshot


def test_a_plan_does_not_warn_of_the_imbalance_of_a_small_model():
    assert imbalance(planned("placement.max_part_mib=null", table=10_000)) == []


def test_a_plan_with_parts_survives_being_written_and_read():
    plan = planned("placement.max_part_mib=0.1", table=100_000)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_says_where_each_part_is(capsys):
    page.show(planned("placement.max_part_mib=0.1", **{"block[a]/kernel": 60_000, "bias": 16}))
    shards = capsys.readouterr().out.split("shards")[-1]
    rows = [[cell.strip() for cell in line.split("│")[2:5]] for line in shards.splitlines()]
    assert [row for row in rows if row and "kernel" in row[0]] == [
        ["block[a]/kernel [0:20000]", "60000", "78.1 KiB"],
        ["block[a]/kernel [20000:40000]", "60000", "78.1 KiB"],
        ["block[a]/kernel [40000:60000]", "60000", "78.1 KiB"],
    ]


def test_parts_of_one_parameter_count_as_one(capsys):
    page.show(planned("placement.max_part_mib=0.1", table=120_000))  # 5 parts on 3 shards
    shards = capsys.readouterr().out.split("shards")[-1]
    assert [line.split("│")[2].strip() for line in shards.splitlines() if "│ ps:" in line] == ["1 parameter"] * 3
