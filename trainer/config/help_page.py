"""The page of `python -m trainer --help`: examples, groups, and the keys to know first."""

import dataclasses
import textwrap

from trainer.config import keys
from trainer.config.comments import meaning, meanings_of_values

COLUMNS, INDENT = 120, 39  # of the page, and of what keys mean

USAGE = """\
Trains a Keras model on a TensorFlow cluster of any size, declared in config.

  python -m trainer                                          one process, on digits that ship with the trainer
  python -m trainer cluster=2ps4w                            2 parameter servers and 4 workers on this machine
  python -m trainer plan cluster=2ps4w                       show what would run where; start nothing
  python -m trainer runs                                     list the runs in runs/, under way and ended
  python -m trainer status run=runs/mine                     how far it is; save, stop and continue steer it
  python -m trainer evaluate run=runs/mine checkpoint=best   its scores; data=... selects other data
  python -m trainer predict run=runs/mine to=out.npz         its outputs: .npz, .csv or .jsonl
  python -m trainer console                                  a web page of all runs, to watch and steer them
  python -m trainer check run=runs/mine                      verify a finished run from what it left
  python -m trainer chaos cluster=2ps3w train.batch_size=48 chaos.random=1   a run under each kind of fault
  python -m trainer doctor                                   check this machine and say how to fix it
  python -m trainer model=mlp model.options.width=64 train.steps=500
  python -m trainer data=npz data.options.path=/data/digits.npz
  python -m trainer user=my_models.py                        functions model and data of your own Python file
  python -m trainer mine/first.yaml train.steps=500          the experiment in your own YAML file
  python -m trainer --config-dir=mine experiment=first       mine/experiment/first.yaml
  python -m trainer --multirun optimizer=sgd,adam            one run after the other

Groups (group=option); the files are in conf/, each says what it sets

$APP_CONFIG_GROUPS
cluster takes any size [<n>ps]<m>w[1e]: n parameter servers, m workers, e.g. 8ps32w; 1e: an evaluator beside them.
model and data take any function of the file named by user=.

The keys to know first (key=value), with their defaults; python -m trainer help train describes every key of a
section, help optimizer.momentum a single key, help data=csv a file of a group, and help sweep a command
"""

KEYS = (  # to know first
    *("name", "run", "resume", "seed", "train.steps", "train.epochs", "train.batch_size", "train.precision"),
    *("optimizer.learning_rate", "optimizer.schedule.name", "strategy.name", "model.loss", "model.metrics"),
    *("evaluate.every", "checkpoint.every", "device.gpus", "device.replicas", "device.layers", "placement.pins"),
    *("launch.name", "loggers", "profile"),
)

FLAGS = """
Flags

  --cfg job            print the config instead of running it
  --multirun, -m       one run for each combination of key=a,b
  --config-dir, -cd    a folder with your own YAML files, laid out as conf/
  --version            versions of the trainer, Python, TensorFlow, Keras and Hydra
  --hydra-help         every flag of Hydra, which composes the config
  -sc install=bash     the script that completes words with the Tab key: eval "$$(trainer -sc install=bash)"

Exit codes: 0 done; 1 trainer doctor or trainer chaos found a problem; 2 config; 65 bad data or NaN; 66 input missing;
69 peer, port or Docker unavailable; 70 internal; 73 run directory in use; 74 storage; 75 all tasks must restart from
a checkpoint; 76 checkpoint invalid; 130, 143 signal.
"""


def template() -> str:
    """Returns the page for `hydra.help.template`: `$APP_CONFIG_GROUPS` is Hydra's, `$$` a dollar."""
    rows = [_row(key) for key in KEYS]
    return USAGE + "\n" + "\n".join(rows).replace("$", "$$") + "\n" + FLAGS


def _row(key: str) -> str:
    """Returns a key with its default, as it is typed, and what it means."""
    *path, name = key.split(".")
    owner = keys.hint(path)
    (field,) = [field for field in dataclasses.fields(owner) if field.name == name]
    of = keys.hint(key.split("."))
    values = f": {', '.join(meanings_of_values(of))}" if meanings_of_values(of) else ""
    lines = textwrap.wrap(meaning(owner, field, of) + values, COLUMNS - INDENT)
    return f"\n{'':{INDENT}}".join([f"  {f'{key}={keys.default(key)}':<{INDENT - 3}} {lines[0]}", *lines[1:]])
