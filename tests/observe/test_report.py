"""The report of a run: its curves, and that the page shows what the directory says and nothing runs in it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from quick_config import load

from trainer.config.sources import conf_dir
from trainer.observe.report import curves, page, settings
from trainer.observe.report.curves import HEIGHT, LEFT, MAX_POINTS, WIDTH, Curve, draw, number
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.storage.run_directory import RunDirectory

HOSTILE = "<script>alert(1)</script>"
MODEL = Description((Parameter("dense/kernel", (784, 128), True),), 10, 8000, 2000)


def make_run(path: Path, *overrides: str, name: str = "x", **summary: Any) -> Path:
    """A run directory as a launcher leaves it."""
    config = load(["cluster=2ps3w", "train.batch_size=48", "train.steps=40", *overrides])
    directory = RunDirectory(path)
    directory.write_inputs(config, make_plan(config, MODEL, Machine(cores=4, gpus=())))
    steps = range(10, 50, 10)
    history = [{"step": step, "loss": 8.0 / step, "accuracy": 0.5, "examples_per_second": 100.0} for step in steps]
    directory.history.write_text("".join(f"{json.dumps(line)}\n" for line in history) + '{"step": 5')
    directory.evaluations.write_text('{"step": 40, "loss": 0.5, "accuracy": 0.75, "seconds": 1.0}\n')
    events = [
        {"time": 1795642925.9, "event": "start", "task": "worker:1", "attempt": 1},
        {"time": 1795642926.9, "event": "exit", "task": "worker:1", "code": -9, "text": f"killed {HOSTILE}"},
    ]
    directory.event_log.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    waits = {"worker:0": {"update": 1.0, "worker:1": 31.5}, "worker:1": {"update": 1.25}}
    contributions = {
        "worker:0": {"applied": 20, "dropped": 3, "staleness_mean": 1.5, "staleness_max": 4, "staleness_histogram": [9]}
    }
    usual = {"steps": 40, "final_loss": 0.2, "waits": waits, "contributions": contributions, "seconds": 61.5}
    directory.summary.write_text(json.dumps(usual | {"params_sha256": "c0ffee", "failed": None} | summary))
    return path


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL))


def test_a_page_shows_what_the_directory_says(tmp_path):
    html = page.write(make_run(tmp_path / "run", "model=mlp", "seed=7")).read_text()
    text = text_of(html)
    assert "state done" in text
    assert "steps 40 of 40" in text
    assert "0.75 evaluation" in text
    assert "1 min 01 s" in text
    assert "worker:1 started again, attempt 2" in text
    assert "worker:0 1.0" not in text  # the columns are by task, and then the update
    assert "worker:0 31.5 1.0 32.5" in text
    assert "worker:0 20 3 1.5 4" in text
    assert "model mlp cnn" in text
    assert "seed 7 0" in text
    assert "params_sha256 c0ffee" in text


def test_a_page_needs_no_script_and_asks_nobody_for_anything(tmp_path):
    html = page.write(make_run(tmp_path / "run")).read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert re.findall(r"""(?:src|href)=["'](?!#|logs/|plan\.json)[^"']*|url\(|@import|https?:""", html) == []


def test_several_runs_are_drawn_in_one_picture_and_their_configs_compared(tmp_path):
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", "optimizer=sgd", "seed=7")
    html = page.write(first, [second], tmp_path / "both.html").read_text()
    assert html.count("<title>a/run, training</title>") == html.count("<title>b/run, training</title>") > 0
    text = text_of(html)
    assert "optimizer.name adam sgd" in text
    assert "seed 0 7" in text
    assert not (first / "report.html").exists()


def test_a_directory_of_a_run_that_has_only_begun_has_a_page(tmp_path):
    path = make_run(tmp_path / "run")
    for name in ("history.jsonl", "evaluations.jsonl", "events.jsonl", "summary.json"):
        (path / name).unlink()
    assert "state died" in text_of(page.write(path).read_text())


def test_changed_names_choices_and_compares_options_with_those_of_the_same_model():
    rows = settings.changed(load(["model=mlp", "model.options.width=64", "optimizer=sgd", "optimizer.momentum=0.9"]))
    assert [row[:2] for row in rows] == [
        ("model", "mlp"),
        ("optimizer", "sgd"),
        ("model.options.width", "64"),
        ("optimizer.momentum", "0.9"),
    ]
    assert settings.changed(load([])) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml")))
def test_options_of_a_data_set_that_have_no_default_are_shown_as_changed(name):
    options = yaml.safe_load((conf_dir() / f"data/{name}.yaml").read_text()).get("options", {})
    given = [f"data.options.{key}" for key, value in options.items() if value == "???"]
    rows = settings.changed(load([f"data={name}", *(f"{key}=1" for key in given)]))
    assert [row for row in rows if row[0] != "data"] == [(key, "1", "(not set)") for key in given]


def test_curves_lie_within_the_picture_and_every_peak_is_drawn():
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    axes = draw([Curve("loss", points), Curve("one", [(0, 2.0)])], logarithmic=False)
    places = [tuple(map(float, place.split())) for place in re.split("[ML]", axes.raw[0].path)[1:]]
    assert len(places) <= MAX_POINTS + 2
    assert min(y for _, y in places) == curves.TOP  # where the peak is; y points down
    assert all(LEFT <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_what_cannot_be_drawn_is_left_out(logarithmic):
    values = [(1, math.nan), (2, 1.0), (3, math.inf), (4, 4.0), (5, -1.0)]
    axes = draw([Curve("loss", values)], logarithmic=logarithmic)
    assert [label for _, _, label in axes.raw[0].dots] == [
        *("loss, step 2: 1", "loss, step 4: 4"),
        *([] if logarithmic else ["loss, step 5: -1"]),
    ]
    assert (draw([Curve("loss", [(1, 0.0)])], logarithmic=logarithmic) is None) == logarithmic
    assert draw([Curve("loss", [])], logarithmic=logarithmic) is None


def test_a_smoothed_curve_begins_at_its_first_value_and_follows_slowly():
    axes = draw([Curve("loss", [(1, 8.0), (2, 8.0), (3, 0.0)])], logarithmic=False)
    last = [float(line.dots[-1][2].rpartition(" ")[2]) for line in (*axes.raw, *axes.smooth)]
    assert last == [0.0, pytest.approx(8 * (1 - 0.1 / (0.1 + 0.09 + 0.081)), abs=1e-3)]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.00002, "2e-05"), (0.5, "0.5"), (1500, "1500"), (20_000, "20k"), (3e6, "3M")]
)
def test_a_number_of_an_axis_is_short(value, text):
    assert number(value) == text


def test_a_page_shows_what_did_not_run_where_it_was_planned(tmp_path):
    path = make_run(tmp_path / "run")
    device, fault = "/job:worker/task:0/cpu:1", f"shard 0 {HOSTILE} is elsewhere"
    record = {"task": "worker:0", "run": "step", "differences": [fault], "devices": {device: [{}, {}, {}]}}
    (path / "placement.json").write_text(json.dumps({"as_planned": False, "records": [record]}))
    html = page.write(path).read_text()
    assert re.search(r'id="placement".*worker:0 /cpu:1</td><td class="number">3<', html, re.DOTALL)
    assert "shard 0" in text_of(html)
    assert HOSTILE not in html
