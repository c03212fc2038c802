"""A value that is written as JSON and read again: no field may be lost on the way."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from trainer.plan.description import Description
from trainer.plan.plan import Plan
from trainer.plan.serialize import from_json, to_json


def example(kind: Any, numbers: Iterator[int]) -> Any:
    """A value of a type, other than any default: every number and word in it is there once."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return example(arguments[0], numbers)
    if origin is tuple:
        return (example(arguments[0], numbers), example(arguments[0], numbers))
    if origin is Mapping:
        return {example(arguments[0], numbers): example(arguments[1], numbers)}
    if is_dataclass(kind) or hasattr(kind, "_asdict"):
        return kind(**{name: example(hint, numbers) for name, hint in get_type_hints(kind).items()})
    return f"word{next(numbers)}" if kind in (str, Any) else kind(next(numbers))


def plan() -> Plan:
    plan: Plan = example(Plan, itertools.count(100))
    jobs = ("worker", "ps")
    tasks = tuple(task.__class__(**vars(task) | {"job": job}) for task, job in zip(plan.tasks, jobs, strict=True))
    return Plan(**vars(plan) | {"strategy": "backup", "wire": "bfloat16", "tasks": tasks})


def test_a_plan_is_read_as_it_was_written():
    assert Plan.from_json(json.loads(json.dumps(plan().to_json()))) == plan()


def test_a_description_is_read_as_it_was_written():
    description = example(Description, itertools.count(100))
    assert from_json(Description, json.loads(json.dumps(to_json(description)))) == description


@pytest.mark.parametrize("field", fields(Plan), ids=lambda field: field.name)
def test_a_plan_without_one_of_its_fields_has_its_default_or_is_not_read(field):
    value = plan().to_json()
    del value[field.name]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if default is MISSING:
        with pytest.raises(KeyError, match=field.name):
            Plan.from_json(value)
    else:
        assert getattr(Plan.from_json(value), field.name) == default


def test_what_follows_from_the_fields_is_written_too():
    value = plan().to_json()
    assert value.keys() - get_type_hints(Plan).keys() == {
        "replicas",
        "replica_batch",
        "bytes_per_step",
        "bytes_per_link",
    }
    assert value["tasks"][0]["log"] == f"logs/worker-{value['tasks'][0]['index']}.log"
    assert value["shards"][0]["nbytes"] == plan().shards[0].nbytes
