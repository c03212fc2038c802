"""Formats of an export and loggers that do not exist are problems before anything starts."""

from __future__ import annotations

import pytest

from trainer.config.schema import ExportConfig
from trainer.plan.checks import export, loggers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ExportConfig(["saved_modell"]), "unknown format 'saved_modell'"),
        (ExportConfig(checkpoint="first"), "'first' must be last, best or a step"),
        (ExportConfig(["onnx"]), "onnx needs the package tf2onnx"),
    ],
)
def test_an_export_that_cannot_be(config, message, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda _: None)
    (problem,) = export.check_export(config)
    assert message in problem.message


def test_an_export_that_can_be():
    assert list(export.check_export(ExportConfig(["keras", "weights", "saved_model", "litert"], "best"))) == []
    assert list(export.check_export(ExportConfig(checkpoint="300"))) == []


def test_a_logger_that_does_not_exist():
    (problem,) = loggers.check_loggers(["csv", "mlfow"])
    assert "unknown logger 'mlfow'; available: csv, mlflow, wandb" in problem.message
    assert "loggers=[mlflow]" in problem.remedy
