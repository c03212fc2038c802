"""The page of `python -m trainer --help`: examples, groups, and the keys that runs change most."""

from functools import reduce

from trainer.config.keys import shown
from trainer.config.schema import RunConfig

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

Keys (key=value) with their defaults; python -m trainer --cfg job lists all of them
"""

KEYS = {
    "mode": "train, plan, runs, status, save, stop, continue, report, check, doctor, ...",
    "launch.warm_minutes": "keep TensorFlow imported for the next command",
    "name": "prefix of the run directory's name",
    "run": "run directory; default: a new one under runs/",
    "resume": "auto, never, or a checkpoint's path",
    "seed": "random seed for weights, data order and dropout",
    "train.steps": "updates of the parameters",
    "train.epochs": "passes over the training data, instead of steps",
    "train.batch_size": "examples in one update, over all replicas",
    "optimizer.learning_rate": "peak learning rate; the schedule scales it",
    "optimizer.schedule.name": "constant, exponential or cosine",
    "train.accumulate": "microbatches of a replica, computed one after the other to save memory",
    "train.precision": "float32, mixed_bfloat16 or mixed_float16",
    "train.jit": "compile the replica step with XLA",
    "train.on_not_finite": "stop, skip or rollback when a gradient is NaN or infinite",
    "strategy.quorum": "backup: replicas that each update waits for",
    "strategy.max_staleness": "async: drop and count gradients that are more steps old than this",
    "strategy.wire": "memory: shared on one machine; float32 or bfloat16: messages",
    "placement.max_part_mib": "auto: balance the hosts; MiB: split larger parameters; null: none",
    "placement.buckets": "shards on each host, sent in parallel; for slow links",
    "evaluate.every": "steps between evaluations; 0: once, at the end",
    "checkpoint.every": "steps between checkpoints; 0: only at the end",
    "checkpoint.keep": "number of newest checkpoints to keep",
    "checkpoint.on_error": "stop or continue when a checkpoint cannot be written",
    "history.every": "steps between lines of history.jsonl and events",
    "device.gpus": "visible GPUs by job or task, e.g. {worker:[0]}",
    "device.memory_fraction": "share of each GPU by job or task, in (0, 1]; or memory_mib, or growth",
    "device.replicas": "devices of a worker's replicas, e.g. [/gpu:0,/gpu:1]",
    "device.layers": "pattern of layer paths -> device, e.g. {dense*:/gpu:1}",
    "device.deterministic": "the same bits in every run on GPUs too; steps may be slower",
    "device.log_placement": "record where everything ran; fail if not as planned",
    "profile": "record where the time of each step goes, as a trace of all tasks",
    "timeouts.roll_call_secs": "deadline for all tasks to come up",
    "timeouts.heartbeat_secs": "restart a task that is silent for longer than this",
    "timeouts.step_secs": "restart a task that blocks a step for longer than this",
    "container.image": "default: trainer:gpu for tasks with GPUs, else trainer:cpu",
    "container.memory_mib": "memory limit by job or task, e.g. {worker:4096}",
    "container.mounts": "paths of the host, mounted read-only, e.g. [/data]",
    "restart.max": "restarts of a failing task within restart.window_secs",
    "restart.max_of": "the same for a job or a task, e.g. {ps:0,worker:5}",
}

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
    keys = "".join(f"  {f'{key}={_default(key)}':<36} {meaning}".rstrip() + "\n" for key, meaning in KEYS.items())
    return USAGE + "\n" + keys + FLAGS


def _default(key: str) -> str:
    """Returns the default of a dotted key, as it is typed."""
    return shown(reduce(getattr, key.split("."), RunConfig()))
