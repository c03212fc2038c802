"""The JSON schema takes every YAML file that ships, refuses what the trainer refuses, and explains every key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import json_schemas
import pytest
from omegaconf import OmegaConf

from trainer.config import json_schema, keys
from trainer.config.typed import TypedConfig

ROOT = Path(__file__).parents[2]
SCHEMA = json_schema.config_schema()
FILES = [*sorted((ROOT / "conf").rglob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
MODELINE = re.compile(r"^# yaml-language-server: \$schema=([^#\n]+)(#\S*)?$", re.MULTILINE)


def errors(text: str, pointer: str = "#") -> list[str]:
    """What the schema refuses of the text of a YAML file."""
    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return list(json_schemas.errors(content, json_schemas.at(pointer, SCHEMA), SCHEMA))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_file_names_the_schema_and_follows_it(path: Path):
    named = MODELINE.search(path.read_text())
    assert named is not None, "its first lines name no schema: # yaml-language-server: $schema=..."
    assert (path.parent / named[1]).resolve() == ROOT / "conf" / "schema.json"
    assert errors(path.read_text(), named[2] or "#") == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_misspelt_key_in_a_shipped_file_is_refused(path: Path):
    named = MODELINE.search(path.read_text())
    assert named is not None
    assert errors(f"{path.read_text()}\nnmae: x\n", named[2] or "#") == ["nmae: unknown key"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("train: { stepz: 3 }", "train.stepz"),
        ("train: { steps: many }", "train.steps"),
        ("train: { steps: 0 }", "train.steps"),
        ("train: { steps: 1.5 }", "train.steps"),
        ("train: { steps: null }", "train.steps"),
        ("train: 5", "train"),
        ("model: cnn", "model"),
        ("optimizer: { name: adm }", "optimizer.name"),
        ("optimizer: { schedule: { decay_rate: 1.5 } }", "optimizer.schedule.decay_rate"),
        ("optimizer: { clip_norm: 0 }", "optimizer.clip_norm"),
        ("device: { gpus: { wroker: [0] } }", "device.gpus"),
        ("device: { gpus: { worker: 0 } }", "device.gpus"),
        ("cluster: { addresses: { 'worker:0': [a] } }", "cluster.addresses"),
        ("defaults: { cluster: 2ps4w }", ""),
        ("defaults: [override /clustre: 2ps4w]", ""),
    ],
)
def test_what_the_trainer_refuses_the_schema_refuses(text, place):
    (error,) = errors(text)
    assert error.partition(":")[0].startswith(place)


@pytest.mark.parametrize(
    "text",
    [
        "train: { steps: '${history.every}', jit: '${profile}' }",
        "seed: ???",
        "optimizer: { learning_rate: 1, clip_norm: null }",
        "device: { gpus: { worker: [0], 'worker:1': [1] }, layers: { 'dense*': /gpu:1 } }",
        "placement: { max_part_mib: 6 }",
        "model: { name: tiny, options: { anything: [1, a] }, loss: { a: mse, b: null }, metrics: [auc] }",
        "defaults: [schema, _self_, cluster: 8ps32w1e, override /model: my, optional data: x, override hydra/help: y]",
        "hydra: { run: { dir: . } }",
        "cluster: { hosts: [a, { address: b, ps: 1 }] }",
    ],
)
def test_what_the_trainer_takes_the_schema_takes(text):
    assert errors(text) == []


def test_the_defaults_of_the_trainer_follow_the_schema():
    assert errors(OmegaConf.to_yaml(OmegaConf.structured(TypedConfig))) == []


def test_every_key_is_in_the_schema_with_its_meaning():
    def rule(key: str) -> dict[str, Any]:
        section, _, name = key.rpartition(".")
        at = SCHEMA["definitions"][section] if section else SCHEMA
        return at["properties"][name]

    plain = [key for key in keys.declared() if key != "experiment" and "$ref" not in rule(key)]
    assert len(plain) > 100
    assert [key for key in plain if not rule(key).get("description")] == []


def test_the_schema_is_json_that_names_its_dialect():
    assert json.loads(json_schema.text())["$schema"] == "http://json-schema.org/draft-07/schema#"
