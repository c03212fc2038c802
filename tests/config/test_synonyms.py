"""Words of other programs are answered with what to type here, and what is typed twice with what counts."""

from __future__ import annotations

import pytest
from quick_config import load

from trainer.config import arguments, synonyms
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError

SETTINGS = {  # what is typed, and what should be
    "epochs=5": "train.epochs=5",
    "num_epochs=5": "train.epochs=5",
    "steps=5": "train.steps=5",
    "lr=0.1": "optimizer.learning_rate=0.1",
    "learning_rate=0.1": "optimizer.learning_rate=0.1",
    "batch_size=32": "train.batch_size=32",
    "bs=32": "train.batch_size=32",
    "optim=adam": "optimizer=adam",
    "gpus=2": "device.gpus={worker:[0,1]}",
    "workers=3": "cluster=3w",
    "ps=1": "cluster=1ps2w",
    "output_dir=runs/x": "run=runs/x",
    "max_grad_norm=1.0": "optimizer.clip_norm=1.0",
    "mixed_precision=bf16": "train.precision=mixed_bfloat16",
    "mixed_precision=true": "train.precision=mixed_float16",
    "early_stopping=3": "evaluate.patience=3",
    "config=my.yaml": "my.yaml",
    "verbose=1": "history.lines=true",
    "metrics=[auc]": "model.metrics=[auc]",
}
FLAGS = {
    "--epochs 5": "train.epochs=5",
    "--epochs=5": "train.epochs=5",
    "-e 5": "train.epochs=5",
    "--lr 0.1": "optimizer.learning_rate=0.1",
    "-b 32": "train.batch_size=32",
    "--num-workers 8": "cluster=8w",
    "--config my.yaml": "my.yaml",
    "--config=my.yaml": "my.yaml",
    "-c my.yaml": "my.yaml",
    "-v": "history.lines=true",
    "-q": "> run.log",
    "--dry-run": "trainer plan",
}
COMMANDS = {
    "fit": "train",
    "test": "evaluate",
    "infer": "predict",
    "ls": "runs",
    "help": "--help",
    "version": "--version",
}


@pytest.mark.parametrize("typed", SETTINGS)
def test_a_setting_of_another_program_is_answered_with_what_to_type(typed):
    with pytest.raises(ConfigError) as caught:
        load([typed])
    assert [SETTINGS[typed] in one.remedy for one in caught.value.problems] == [True]


@pytest.mark.parametrize("typed", FLAGS)
def test_a_flag_of_another_program_is_answered_with_what_to_type(typed):
    faults = arguments.sort(typed.split()).faults
    assert [one.remedy.partition(",")[0] for one in faults] == [f"type {FLAGS[typed]}"]


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_of_another_program_is_answered_with_what_to_type(typed):
    assert [COMMANDS[typed] in one.remedy for one in arguments.sort([typed]).faults] == [True]


def test_synonyms_are_no_words_of_this_config():
    config = load([])
    assert not [word for word in synonyms.KEY_OF if hasattr(config, word)]
    assert not [word for word in synonyms.COMMANDS if word in Mode.__members__]


@pytest.mark.parametrize(
    ("typed", "overrides", "notes"),
    [
        ("cluster=1w cluster=2w", ["cluster=2w"], 1),
        ("train.steps=5 seed=1 train.steps=6", ["seed=1", "train.steps=6"], 1),
        ("run=a run=b run=c", ["run=c"], 2),
        ("cluster=1w cluster=1w", ["cluster=1w"], 0),
        ("train={steps:5} train={batch_size:8}", ["train={steps:5}", "train={batch_size:8}"], 0),
        ("plan plan", ["mode=plan", "plan"], 0),
    ],
)
def test_the_last_of_several_values_counts_and_is_named(typed, overrides, notes):
    sorted_ = arguments.sort(typed.split())
    assert (list(sorted_.overrides), len(sorted_.notes)) == (overrides, notes)


@pytest.mark.parametrize(
    ("content", "typed", "chosen"),
    [
        ("optimizer: adamw", "", ("adamw", "local", "cnn")),
        ("optimizer: adamw\ncluster: 1ps2w\nmodel: mlp", "", ("adamw", "1ps2w", "mlp")),
        ("optimizer: adamw", "optimizer=sgd", ("sgd", "local", "cnn")),
        ("defaults: [{override /model: mlp}]\noptimizer: lion", "", ("lion", "local", "mlp")),
        ("optimizer: {name: lion}", "", ("lion", "local", "cnn")),
    ],
)
def test_a_file_chooses_from_a_group_by_name(tmp_path, monkeypatch, content, typed, chosen):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(content)
    config = load(["experiment=mine.yaml", *typed.split()])
    assert (config.optimizer.name.value, config.cluster.name, config.model.name) == chosen
    assert config.given == ("name",)


def test_a_choice_that_a_group_does_not_have_and_a_key_with_dots_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, remedy in (("optimizer: adamx", "optimizer=adam"), ("train.steps: 5", "train: {steps: 5}")):
        (tmp_path / "mine.yaml").write_text(content)
        with pytest.raises(ConfigError) as caught:
            load(["experiment=mine.yaml"])
        assert [remedy in one.remedy for one in caught.value.problems] == [True]
