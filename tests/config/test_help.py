"""What `trainer help TOPIC` explains."""

from __future__ import annotations

import sys

import pytest

from trainer.config import compose, keys


def helped(monkeypatch, *words):
    """The exit code of `trainer help` with these words."""
    monkeypatch.setattr(sys, "argv", ["trainer", "help", *words])
    with pytest.raises(SystemExit) as raised:
        compose.run(lambda given: 7, compose.as_composed)
    return raised.value.code


@pytest.mark.parametrize(
    ("topic", "names"),
    [
        ("optimizer", ["optimizer.learning_rate=0.001", "optimizer.schedule.decay_steps=1000.0", "adamw"]),
        ("train.precision", ["train.precision=float32", "mixed_bfloat16"]),
        ("data=csv", ["conf/data/csv.yaml", "separator"]),
        ("sweep", ["trainer sweep", "sweep.space={}"]),
        ("status", ["trainer status"]),
    ],
)
def test_a_topic_is_a_section_a_key_a_file_or_a_command(topic, names, monkeypatch, capsys):
    assert helped(monkeypatch, topic) == 0
    printed = capsys.readouterr().out
    assert [name for name in names if name not in printed] == []


def test_every_section_and_key_has_help(monkeypatch, capsys):
    topics = [key for key in keys.declared() if key != "experiment"]
    assert helped(monkeypatch, *topics) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(topics)


def test_a_misspelt_topic_starts_nothing_and_names_the_nearest(monkeypatch, capsys):
    assert helped(monkeypatch, "optimiser") == 2
    assert "optimizer" in capsys.readouterr().err


def test_help_alone_is_the_page_of_the_flag(monkeypatch, capsys):
    assert helped(monkeypatch) == 0
    page = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["trainer", "--help"])
    with pytest.raises(SystemExit):
        compose.run(lambda given: 7, compose.as_composed)
    assert page == capsys.readouterr().out
