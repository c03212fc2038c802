"""loggers=[wandb]: a run of Weights & Biases; WANDB_MODE=offline keeps it in loggers/wandb of the run directory."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

import wandb

from trainer.observe.loggers import LoggedRun


class WandbLogger:
    """The project is $WANDB_PROJECT, or the `name` of the config."""

    def start(self, run: LoggedRun) -> None:
        run.state.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.experiment,
            name=run.name,
            id=run.state["id"],
            resume="allow",
            config=dict(run.config),
            dir=run.path / "loggers",
        )
        self._run.define_metric("*", step_metric="step")  # scores of an evaluation may come after later steps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        facts = {name: value for name, value in summary.items() if isinstance(value, str | int | float)}
        self._run.summary.update(facts)
        self._run.finish(1 if summary.get("failed") else 0)
