"""A folder that was never a run is not taken for one; one that was is, whatever has become of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.faults.problems import ConfigError
from trainer.storage import foreign

CONFIG = "cluster: {name: 1ps2w}\ntrain: {steps: 3}\nmodel: {name: mlp}\n"
PLAN = '{"cluster": "1ps2w", "tasks": [], "shards": []}'
MANIFEST = "checkpoints/000000005/manifest.json"


def fill(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"config.yaml": "server: {port: 80}\n"}, "config.yaml"),
        ({"config.yaml": ""}, "config.yaml"),
        ({"config.yaml": "- a\n- b\n"}, "config.yaml"),
        ({"config.yaml": "model: resnet\ntrain: {lr: 0.1}\n"}, "config.yaml"),  # of another trainer
        ({"config.yaml": "{{ broken"}, "config.yaml"),
        ({"summary.json": '{"loss": 0.1}'}, "summary.json"),
        ({"report.html": "<h1>Sales</h1>"}, "report.html"),
        ({"plan.json": '{"title": "Q3"}'}, "plan.json"),
        ({"status.json": "[]", "history.jsonl": "x"}, "history.jsonl"),
        ({"generation.json": "7"}, "generation.json"),
        ({"checkpoints/model.pt": ""}, "checkpoints/"),
        ({"checkpoints/2024/manifest.json": "{}"}, "checkpoints/"),
        ({"events/party.txt": ""}, "events/"),
        ({"export/data.csv": ""}, "export/"),
        ({"journal/monday.md": ""}, "journal/"),
    ],
)
def test_a_folder_of_something_else_is_refused_by_the_name_of_what_it_has(tmp_path: Path, files, named: str):
    folder = fill(tmp_path / "mine", files)
    with pytest.raises(ConfigError) as refused:
        foreign.check(folder)
    (problem,) = refused.value.problems
    assert problem.key == "run"
    assert {str(folder), named} <= set(problem.message.replace(",", "").split())


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"notes.txt": "", "src/main.py": ""},
        {"logs/worker-0.log": "", "launcher.log": "", "lock": "1\n", "slurm/job": "3"},
        {"config.yaml": CONFIG},  # also of an older version, with fewer keys
        {"config.yaml": CONFIG, "plan.json": PLAN, "summary.json": "{}", "report.html": ""},
        {"config.yaml": "", "plan.json": PLAN},
        {"config.yaml": "\0", "plan.json": "", MANIFEST: "{}"},
        {"config.yaml": "", "journal/worker-0.jsonl": ""},
        {"generation.json": '{"loaded": 1, "launched_at": 0}', "history.jsonl": ""},
        {MANIFEST: "damaged"},
    ],
)
def test_a_run_is_one_whatever_became_of_its_files(tmp_path: Path, files):
    foreign.check(fill(tmp_path, files))


def test_a_folder_that_does_not_exist_is_free(tmp_path: Path):
    foreign.check(tmp_path / "new")
