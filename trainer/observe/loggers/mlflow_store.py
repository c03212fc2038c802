"""loggers=[mlflow]: a run of MLflow, at $MLFLOW_TRACKING_URI or MLflow's default location."""

import os
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from trainer.observe.loggers import LoggedRun

AT_ONCE = 100  # parameters in a request
LONGEST = 500  # characters of a parameter


class MlflowLogger:
    """The experiment is $MLFLOW_EXPERIMENT_NAME, or the `name` of the config."""

    def start(self, run: LoggedRun) -> None:
        self._client = MlflowClient()
        self._id: str = run.state.get("run_id", "")
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = run.state["run_id"] = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = iter([Param(key, value[:LONGEST]) for key, value in run.config.items()])
        while some := list(islice(params, AT_ONCE)):
            self._client.log_batch(self._id, params=some)
        self._client.log_batch(self._id, tags=[RunTag("run_dir", str(run.path))])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, summary: Mapping[str, Any]) -> None:
        facts = {name: summary.get(name) for name in ("params_sha256", "steps", "restarts", "failed")}
        tags = [RunTag(name, str(value)) for name, value in facts.items() if value is not None]
        self._client.log_batch(self._id, tags=tags)
        is_whole = "eval_loss" in summary
        self._client.set_terminated(
            self._id, "FAILED" if summary.get("failed") else "FINISHED" if is_whole else "KILLED"
        )
