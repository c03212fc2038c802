"""The metrics of a task and of a run, and a Prometheus that reads them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import page
from prometheus_client.parser import text_string_to_metric_families
from runs import wait_until

from trainer.launch.processes.ports import HeldPorts
from trainer.observe import metrics
from trainer.observe.metrics import RunMetrics
from trainer.observe.task_page import STEP_BUCKETS, TaskPage

MONITORING = Path(__file__).resolve().parents[2] / "compose" / "monitoring"
MISSING = "is missing: apt-get install prometheus"
CONTRIBUTIONS = {
    "worker:1": {
        "applied": 6,
        "dropped": 2,
        "staleness_mean": 1.5,
        "staleness_max": 3,
        "staleness_histogram": [1, 2, 2, 1],
    }
}


def pages() -> list[TaskPage]:
    """Of a ps and a worker that has made three steps."""
    trains = page("worker:1", "training", run='/runs/a "b"', step=9, steps=3, examples=192, loss=0.5)
    trains.metrics = {"accuracy": 0.75, "auc": float("nan")}
    trains.contributions, trains.dropped_as = CONTRIBUTIONS, "stale"
    trains.step_secs, trains.wait_secs, trains.compute_secs = 61.5, 1.0, 60.25
    for secs in (0.001, 0.4, 61.0):
        trains.count_step(secs)
    return [page("ps:0", "serving", run='/runs/a "b"'), trains.as_of_now()]


OF_RUN = RunMetrics('/runs/a "b"', {"cluster": "1ps2w"}, {("worker:0", "SIGKILL"): 2}, 40)


def samples(text: bytes) -> dict[tuple[Any, ...], float]:
    """Value by name, role, index and what other labels there are."""
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "run")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_the_pages_of_a_run_become_metrics_by_task():
    found = samples(metrics.text(pages(), OF_RUN))
    assert found["trainer_global_step", "1", "worker"] == 9
    assert found["trainer_steps_total", "0", "ps"] == 0
    assert found["trainer_examples_total", "1", "worker"] == 192
    assert found["trainer_loss", "1", "worker"] == 0.5
    assert ("trainer_loss", "0", "ps") not in found
    assert found["trainer_metric", "1", "accuracy", "worker"] == 0.75
    assert found["trainer_state", "0", "ps", "serving"] == 1
    phases = {key[2]: value for key, value in found.items() if key[0] == "trainer_phase_seconds_total"}
    assert phases == {"wait": 1.0, "compute": 60.25, "other": 0.25}
    assert found["trainer_gradients_dropped_total", "1", "stale", "worker"] == 2
    assert found["trainer_restarts_total", "0", "SIGKILL", "worker"] == 2
    assert found["trainer_checkpoint_last_step",] == 40
    assert found["trainer_run_info", "1ps2w"] == 1
    assert found["process_resident_memory_bytes", "1", "worker"] > 2**20


def test_histograms_are_cumulative_and_their_last_bucket_has_all():
    found = samples(metrics.text(pages()))
    steps = [value for key, value in found.items() if key[0] == "trainer_step_duration_seconds_bucket"]
    assert len(steps) == len(STEP_BUCKETS) + 1
    assert (steps[0], steps[7], steps[8], steps[-2], steps[-1]) == (1, 1, 2, 2, 3)
    assert found["trainer_step_duration_seconds_sum", "1", "worker"] == 61.5
    stale = [value for key, value in found.items() if key[0] == "trainer_gradient_staleness_steps_bucket"]
    assert stale == [1, 3, 5, 6, 6]
    assert found["trainer_gradient_staleness_steps_sum", "1", "worker"] == 9
    assert found["trainer_gradient_staleness_steps_count", "1", "worker"] == 6


def test_every_name_follows_the_rules_of_prometheus():
    blocks = re.split(r"(?=^# HELP )", metrics.text(pages(), OF_RUN).decode(), flags=re.MULTILINE)[1:]
    assert len(blocks) == 23
    for block in blocks:
        match = re.match(r"# HELP (\S+) [A-Z].+\.\n# TYPE (\S+) (gauge|counter|histogram)\n", block)
        assert match, block
        name, typed, kind = match.groups()
        assert typed == name
        assert name.startswith(("trainer_", "process_"))
        assert name.endswith("_total") == (kind == "counter")
        assert not name.endswith(("_secs", "_ms", "_mib", "_count"))
        assert not re.search(r'[{,](job|instance|__\w+)="', block)  # Prometheus's own


@pytest.mark.skipif(shutil.which("promtool") is None, reason=f"promtool {MISSING}")
def test_promtool_accepts_the_metrics_and_the_rules():
    for words, text in (
        (["metrics"], metrics.text(pages(), OF_RUN).decode()),
        (["rules", str(MONITORING / "alerts.yml")], ""),
        (["config", "--syntax-only", str(MONITORING / "prometheus.yml")], ""),
    ):
        ended = subprocess.run(["promtool", "check", *words], input=text, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.cluster
def test_the_endpoint_of_a_run_says_where_it_is_and_forgets_it(start, tmp_path):
    run = start(
        *("cluster=1ps2w", "model=mlp", "train.batch_size=48", "train.steps=1000000", "history.every=1"),
        *("prometheus.port=0", "prometheus.discovery=targets"),
    )
    run.wait_for_step(5)
    (file,) = (tmp_path / "targets").iterdir()
    assert file.name.startswith("run-")
    ((target,),) = (one["targets"] for one in json.loads(file.read_text()))
    assert json.loads((run.directory / "prometheus.json").read_text()) == json.loads(file.read_text())
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        found = samples(answer.read())
    assert {key[1:] for key in found if key[0] == "trainer_steps_total"} == {
        ("0", "ps"),
        ("0", "worker"),
        ("1", "worker"),
    }
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert not file.exists()
    assert not (run.directory / "prometheus.json").exists()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus with the shipped config, which finds runs in tmp_path / "prometheus"."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "alerts.yml")]
    (finding,) = config["scrape_configs"][0]["file_sd_configs"]
    finding["files"] = [name.replace("/runs/", f"{tmp_path}/") for name in finding["files"]]
    finding["refresh_interval"] = "1s"
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with HeldPorts(1) as held:
        port = held.ports[0]
    words = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "prometheus.log").open("w") as log:
        server = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(timeout=30)


def ask(prometheus: str, path: str, **query: str) -> Any:
    try:
        with urllib.request.urlopen(
            f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.loads(answer.read())["data"]
    except OSError:  # it is not up yet
        return None


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("prometheus") is None, reason=f"NO PROMETHEUS READ THE METRICS: it {MISSING}")
def test_a_prometheus_answers_every_expression_of_the_dashboard_and_every_alert(start, prometheus, tmp_path):
    """While workers train, one of which is killed and comes back."""
    run = start(
        *("cluster=2ps3w", "strategy=async", "strategy.max_staleness=1", "model=mlp", "train.batch_size=48", "run=run"),
        *("train.steps=1000000", "history.every=20", "checkpoint.every=200", "prometheus.port=0"),
        "prometheus.discovery=prometheus",
    )
    run.wait_for_step(100)
    status = json.loads((run.directory / "status.json").read_text())
    subprocess.run(["kill", "-9", str(status["attempts"]["worker:2"]["pid"])], check=True)
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    expressions = [target["expr"].replace("$run", ".*") for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) == 15

    def unanswered() -> list[str]:
        return [one for one in expressions if not (ask(prometheus, "query", query=one) or {}).get("result")]

    wait_until(lambda: not unanswered(), progress=run.progress, explain=lambda: "\n".join(unanswered()), poll_secs=1.0)
    (group,) = ask(prometheus, "rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == {
        rule["alert"]: "ok" for rule in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    }
    (target,) = ask(prometheus, "targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
