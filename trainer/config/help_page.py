"""What `python -m trainer --help` prints: what to type, the groups, and the keys that runs change most."""

from __future__ import annotations

from functools import reduce

from trainer.config.keys import shown
from trainer.config.schema import RunConfig

USAGE = """\
Trains a Keras model on a TensorFlow cluster of any size, declared in config.

  python -m trainer                                          one process, digits that are shipped
  python -m trainer cluster=2ps4w                            2 parameter servers and 4 workers on this machine
  python -m trainer cluster=2ps4w mode=plan                  what would run where, without starting anything
  python -m trainer mode=check run=runs/mine                 whether what a run left is as promised
  python -m trainer mode=chaos cluster=2ps3w train.batch_size=48 chaos.random=1   a run under each kind of fault
  python -m trainer mode=bench bench.quick=true              this trainer beside others, from a checkout of it
  python -m trainer mode=doctor                              what this machine lacks, and what to type
  python -m trainer experiment=matpow                        A^n + B^n on one device and on two, timed
  python -m trainer model=mlp model.options.width=64 train.steps=500
  python -m trainer data=npz data.options.path=/data/digits.npz
  python -m trainer user=my_models.py model=tiny data=blobs  functions of a Python file of yours
  python -m trainer --config-dir=mine experiment=first       mine/experiment/first.yaml
  python -m trainer --multirun optimizer=sgd,adam            one run after the other

Groups (group=option); the files are in conf/, each says what it sets

$APP_CONFIG_GROUPS
cluster takes any size [<n>ps]<m>w[1e]: n parameter servers, m workers, e.g. 8ps32w; 1e: an evaluator beside them.
model and data take any function of the file named by user=.

Keys (key=value) with their defaults; python -m trainer --cfg job lists all of them
"""

KEYS = {
    "mode": "train, plan, render, check, chaos, bench, doctor, selftest, clean or matpow",
    "launch": "local (processes) or docker (containers of this machine)",
    "name": "starts the run directory's name",
    "run": "run directory; null: a new one under runs/",
    "resume": "auto, never, or a checkpoint's path",
    "seed": "of the weights, the data's order and dropout",
    "train.steps": "updates of the parameters",
    "train.batch_size": "examples of one update, over all replicas",
    "optimizer.learning_rate": "at full height; the schedule scales it",
    "optimizer.schedule.name": "constant, exponential or cosine",
    "train.accumulate": "parts that a replica computes its examples in, one after the other",
    "train.precision": "float32, mixed_bfloat16 or mixed_float16",
    "train.jit": "compile the replica step with XLA",
    "train.on_not_finite": "stop, skip or rollback, when a gradient is NaN or infinite",
    "strategy.quorum": "backup: replicas that an update waits for",
    "strategy.max_staleness": "async: steps; older gradients are dropped and counted",
    "strategy.wire": "memory: shared by tasks of one machine; float32 or bfloat16: messages",
    "placement.max_part_mib": "larger parameters are cut into parts, on several shards",
    "placement.buckets": "shards of each host, that travel side by side; for slow links",
    "evaluate.every": "steps; 0: once, at the end",
    "checkpoint.every": "steps; 0: only at the end",
    "checkpoint.keep": "newest checkpoints kept",
    "checkpoint.on_error": "stop or continue, when a checkpoint cannot be written",
    "summary.every": "steps between lines of history.jsonl and events",
    "device.gpus": "visible GPUs by job or task, e.g. {worker:[0]}",
    "device.memory_fraction": "share of each GPU by job or task, in (0, 1]; or memory_mib, or growth",
    "device.replicas": "devices of a worker's replicas, e.g. [/gpu:0,/gpu:1]",
    "device.layers": "pattern of layer paths -> device, e.g. {dense*:/gpu:1}",
    "device.log_placement": "write where everything ran; fail if not as planned",
    "profile": "write where the time of each step goes, as a trace of all tasks",
    "timeouts.roll_call_secs": "seconds until all tasks must be up",
    "timeouts.heartbeat_secs": "a task that is silent for longer is ended and replaced",
    "timeouts.step_secs": "so is one that a step waits for longer for",
    "container.image": "null: trainer:gpu where a task has GPUs, else trainer:cpu",
    "container.memory_mib": "limit of a container by job or task, e.g. {worker:4096}",
    "container.mounts": "paths of the host that tasks read, e.g. [/data]",
    "restart.max": "times that a task that fails is started again, within restart.window_secs",
    "restart.max_of": "the same of a job or a task, e.g. {ps:0,worker:5}",
}

FLAGS = """
Flags

  --cfg job            print the config instead of running it
  --multirun, -m       one run for each combination of key=a,b
  --config-dir, -cd    a folder of your own YAML files, laid out as conf/
  --hydra-help         every flag of Hydra, which composes the config

Exit codes: 0 done; 1 the doctor or the chaos found a problem; 2 config; 65 bad data or NaN; 66 input missing;
69 peer, port or engine unavailable; 70 internal; 73 run directory in use; 74 storage; 75 all tasks must start again,
from a checkpoint; 76 checkpoint invalid; 130, 143 signal.
"""


def template() -> str:
    """The page for `hydra.help.template`: `$APP_CONFIG_GROUPS` is Hydra's, `$$` a dollar."""
    keys = "".join(f"  {f'{key}={_default(key)}':<36} {meaning}".rstrip() + "\n" for key, meaning in KEYS.items())
    return USAGE + "\n" + keys + FLAGS


def _default(key: str) -> str:
    """The value of a dotted key in a config of which nothing was chosen, as it is typed."""
    return shown(reduce(getattr, key.split("."), RunConfig()))
