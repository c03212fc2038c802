"""Formats of an export and loggers that do not exist are problems before anything starts."""

from __future__ import annotations

from trainer.plan.checks import export, loggers


def test_formats_that_do_not_exist_or_need_a_package_are_refused(refused, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda _: None)
    codes = "export.formats/unknown-choice export.formats/not-available"
    refused(codes, export.check_formats, ["keras", "saved_modell", "onnx", "litert"])


def test_a_checkpoint_is_named_by_last_best_or_a_step(refused):
    assert [problem for name in ("last", "best", "300") for problem in export.check_checkpoint(name)] == []
    refused("export.checkpoint/malformed", export.check_checkpoint, "first")


def test_a_logger_that_does_not_exist(refused):
    refused("loggers/unknown-choice", loggers.check_loggers, ["csv", "mlfow"])
