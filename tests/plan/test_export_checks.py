"""Formats of an export and loggers that do not exist are problems before anything starts."""

from __future__ import annotations

import pytest

from trainer.config.schema import ExportConfig
from trainer.plan.checks import export, loggers


@pytest.mark.parametrize(
    ("config", "codes"),
    [
        (ExportConfig(["saved_modell"]), "export.formats/unknown-choice"),
        (ExportConfig(checkpoint="first"), "export.checkpoint/malformed"),
        (ExportConfig(["onnx"]), "export.formats/not-available"),
    ],
)
def test_an_export_that_cannot_be(config, codes, monkeypatch, refused):
    monkeypatch.setattr(export, "find_spec", lambda _: None)
    refused(codes, export.check_export, config)


def test_an_export_that_can_be():
    assert list(export.check_export(ExportConfig(["keras", "weights", "saved_model", "litert"], "best"))) == []
    assert list(export.check_export(ExportConfig(checkpoint="300"))) == []


def test_a_logger_that_does_not_exist(refused):
    refused("loggers/unknown-choice", loggers.check_loggers, ["csv", "mlfow"])
