"""Sentences that were hard to read are gone from code, config and pages, and those in their place are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("trainer", "conf", "docs", "compose", "bench", "examples")
SUFFIXES = (".py", ".md", ".yaml", ".sh")

# What was written, and what is now; a brace stands for what an f-string fills in.
SENTENCES = [
    ("stops after this step and saves", "finishing this step and saving a checkpoint (at most {}"),
    ("once more: stops at once", "Press Ctrl-C again to stop now."),
    ("to continue, type the same command with run=PATH", "at step {}, checkpoint saved"),
    ("is gone (", "'left' if attempt.code in LEFT_BEHIND else 'died'} ({why})"),
    ("starts it again in", "restarting it in {} s ({}"),
    ("the loss is not finite at step", "%s is NaN or infinite at step %d"),
    (", nor are", ", and so are {} other gradients"),
    ("the run ends at step", "checkpoint is at step {}, but train.steps is {}"),
    ("type train.steps=232", "use train.steps={} or more"),
    ("is not a cluster size: it reads", "is not a cluster size{}"),
    ("give a number, e.g. optimizer.learning_rate=1 ", "{} is not a finite number"),
    ("there is no model '", "unknown {} '{}'; available: {}"),
    ("vectors do not travel", "parameters and gradients stay in shared memory ({}); messages only say where"),
    ("fitted to steps within", "largest error where fitted: {} of step time, {} of CPU time"),
    ("holds on this machine", "is valid on this machine"),
    ("what this machine lacks, and what to type", "check this machine and say how to fix it"),
    ("of the weights, the data's order and dropout", "random seed for weights, data order and dropout"),
    ("at full height", "peak learning rate; the schedule scales it"),
    ("so is one that a step waits for longer for", "restart a task that blocks a step for longer than this"),
    ("null: a new one under runs/", "run directory; default: a new one under runs/"),
    ("0 examples/s, eval_", "already finished: {} of {} steps"),
    ("ended (-9)", "Stopped {}. To {}: {}"),
]


@cache
def sources() -> str:
    """Code, config and pages, with strings that several lines make up in one piece."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *files])
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize(("before", "now"), SENTENCES, ids=[before for before, _ in SENTENCES])
def test_a_sentence_has_its_better_form_everywhere(before, now):
    assert before not in sources()
    pattern = r"\{[^{}\n]*\}".join(map(re.escape, now.split("{}")))
    assert re.search(pattern, sources())
