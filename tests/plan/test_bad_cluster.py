"""Every bad cluster, typed as the real command: exit 2, the answer alone, and nothing started or left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import Forks
from quick_config import load

from trainer.faults.problems import ConfigError
from trainer.plan import validate
from trainer.plan.devices import Machine

pytestmark = pytest.mark.slow

SMALL = Machine(cores=2, gpus=0)


def addresses(ps: str = "10.0.0.1:2222", worker: str = "10.0.0.2:2222,10.0.0.3:2222") -> list[str]:
    return ["cluster=1ps2w", f"cluster.addresses={{ps:['{ps}'],worker:[{worker}]}}"]


def tf_config(value: object) -> dict[str, str]:
    return {"TF_CONFIG": value if isinstance(value, str) else json.dumps(value)}


TWO_WORKERS = {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}

# What is typed, the environment, and what is answered: where and what, then what to type.
COMMANDS = [
    pytest.param(
        ["cluster=2ps"], {}, ["cluster=2ps: '2ps' is not a cluster size: it has no workers", "cluster=2ps1w"], id="2ps"
    ),
    pytest.param(
        ["cluster=0ps4w"],
        {},
        ["cluster=0ps4w: '0ps4w' is not a cluster size: 0ps is wrong, counts start at 1 and", "cluster=4w"],
        id="0ps4w",
    ),
    pytest.param(
        ["cluster=2ps0w"],
        {},
        ["cluster=2ps0w: '2ps0w' is not a cluster size: 0w is wrong, counts start at 1 and", "cluster=2ps1w"],
        id="2ps0w",
    ),
    pytest.param(
        ["cluster=w4"], {}, ["cluster=w4: 'w4' is not a cluster size such as 2ps4w, 4w", "cluster=4w"], id="w4"
    ),
    pytest.param(
        ["cluster=2ps4q"],
        {},
        ["cluster=2ps4q: '2ps4q' is not a cluster size such as 2ps4w", "cluster=2ps4w"],
        id="2ps4q",
    ),
    pytest.param(
        ["cluster=2ps4w", "cluster.worker=8"],
        {},
        ["cluster: cluster=2ps4w and cluster.ps=2 cluster.worker=8 contradict each other", "type cluster=2ps8w"],
        id="size and count",
    ),
    pytest.param(
        ["cluster.ps=2"],
        {},
        ["cluster: cluster=local and cluster.ps=2 cluster.worker=1 contradict each other", "type cluster=2ps1w"],
        id="local and a count",
    ),
    pytest.param(
        addresses(ps="10.0.0.2:2222"),
        {},
        [
            "cluster.addresses.worker[0]: 10.0.0.2:2222 of cluster.addresses.worker[0] is also cluster.addresses.ps[0]",
            "e.g. 10.0.0.2:2223; the status page is 1000 above",
        ],
        id="duplicate",
    ),
    *(
        pytest.param(
            addresses(ps=f"10.0.0.1:{port}"),
            {},
            [
                f"cluster.addresses.ps[0]: '10.0.0.1:{port}' has port '{port}'; a port is a number from 1 to 64535",
                "e.g. 10.0.0.1:2222",
            ],
            id=f"port {port}",
        )
        for port in ("0", "99999", "http")
    ),
    pytest.param(
        addresses(ps="http://10.0.0.1:2222"),
        {},
        [
            "cluster.addresses.ps[0]: 'http://10.0.0.1:2222' has a scheme; write host:port, without http://",
            "e.g. 10.0.0.1:2222",
        ],
        id="scheme",
    ),
    pytest.param(
        [*addresses(), "job=worker", "task=2"],
        {},
        ["task: 2 is not a task of worker; worker has tasks 0..1", "e.g. job=worker task=1"],
        id="index",
    ),
    pytest.param(
        [*addresses(), "job=chief", "task=0"],
        {},
        ["job: 'chief' is not a job; available: ps, worker, evaluator", "e.g. job=worker task=0"],
        id="job",
    ),
    pytest.param(
        addresses(ps="8.8.8.8:2222"),
        {},
        [
            "cluster.addresses.ps[0]: 8.8.8.8:2222 is a public address, and TensorFlow's gRPC has no authentication",
            "use a private address, or security.allow_untrusted_network=true if a firewall protects it",
        ],
        id="public",
    ),
    pytest.param(
        [],
        tf_config("{cluster"),
        ["TF_CONFIG: it is not JSON (Expecting property name", 'write {"cluster": {"ps": ["ps-0:2222"],'],
        id="TF_CONFIG no JSON",
    ),
    pytest.param(
        [],
        tf_config([1]),
        ["TF_CONFIG: it is a JSON list, not an object with cluster and task", 'write {"cluster": {"ps":'],
        id="TF_CONFIG a list",
    ),
    pytest.param(
        [],
        tf_config({"cluster": TWO_WORKERS}),
        ["TF_CONFIG: it has no task with a type and an index, so this process does not know its role", "write {"],
        id="TF_CONFIG no task",
    ),
    pytest.param(
        ["cluster=2ps4w"],
        tf_config({"cluster": TWO_WORKERS, "task": {"type": "worker", "index": 0}}),
        [
            "TF_CONFIG: it describes cluster 2w, but the command line says cluster=2ps4w",
            "leave cluster= out, or type cluster=2w",
        ],
        id="TF_CONFIG contradicts",
    ),
    pytest.param(
        ["cluster=1ps2w", "device.gpus={worker:[99]}"],
        {},
        ["device.gpus: there is no GPU 99; this machine has "],
        id="GPU",
    ),
    pytest.param(
        ["cluster=1ps2w", "device.gpus={worker:[0]}", "device.memory_fraction={worker:0.7}"],
        {},
        ["device.memory_fraction: the tasks on GPU 0 take 2 x 0.7 = 1.4 > 1 of its memory", "give each at most 0.5"],
        id="memory fractions",
    ),
    pytest.param(
        ["cluster=1ps2w", "model=mlp", "placement.pins={conv*:0,dense0/*:4}"],
        {},
        [
            "placement.pins: pin 'conv*' matches no parameter; the nearest are ",
            "e.g. 'placement.pins={dense",
            "placement.pins: pin 'dense0/*' names shard 4; available: shards 0..0",
            "e.g. 'placement.pins={dense0/*:0}'",
        ],
        id="pins",
    ),
    pytest.param(
        ["cluster=1ps2w", "model=mlp", "device.layers={conv:/cpu:3}"],
        {},
        ["device.layers: pin 'conv' matches no layer; the nearest are ", "e.g. 'device.layers={", ":/cpu:3}'"],
        id="layer pin",
    ),
    pytest.param(
        ["cluster=1ps2w", "restart.max_of={wroker:3}"],
        {},
        [
            "restart.max_of.wroker: 'wroker' is neither a job nor a task of the cluster; available: ps (ps:0), worker",
            "e.g. 'restart.max_of={worker:3}'",
        ],
        id="restart of nobody",
    ),
    pytest.param(
        ["strategy=sync", "strategy.quorum=0", "train.steps=0", "optimizer.learning_rate=nan", "name=My", "sede=1"],
        {},
        [
            "strategy: sync needs tasks that hold the shards, but cluster=local has neither ps nor other workers\n"
            "    type cluster=1ps2w or cluster=2w, or leave strategy out",
            "strategy.quorum: 0 is out of range; it must be 1..1\n    type strategy.quorum=1",
            "train.steps: 0 is out of range; it must be at least 1\n    e.g. train.steps=1",
            "optimizer.learning_rate: nan is not a finite number\n    give a number, e.g. optimizer.learning_rate=",
            "name: 'My' must be 1 to 63 characters from a-z, 0-9 and -\n    e.g. name=my",
            "sede=1: unknown key sede\n    did you mean seed=1?",
        ],
        id="all at once",
    ),
    pytest.param(
        ["cluster=4w", "strategy=backup", "strategy.quorum=5", "train.batch_size=255"],
        {},
        [
            "strategy.quorum: 5 is out of range; it must be 1..4\n    type strategy.quorum=4",
            "train.batch_size: 255 examples cannot be divided evenly among 4 replicas; "
            "the nearest sizes are 252 or 256\n"
            "    type train.batch_size=256",
        ],
        id="quorum and batch",
    ),
    pytest.param(
        ["cluster=9999ps9999w", "train.batch_size=9999"],
        {},
        [
            "cluster: cluster=9999ps9999w is 19,998 tasks on ",
            "64 a core",
            "for tasks on several machines give cluster.hosts",
        ],
        id="many",
    ),
]


@pytest.mark.long(but=["2ps", "duplicate", "TF_CONFIG contradicts", "GPU", "all at once", "many"])
@pytest.mark.parametrize(("overrides", "environment", "answer"), COMMANDS)
def test_a_bad_cluster_is_explained_by_the_command_which_starts_and_writes_nothing(
    tmp_path: Path, python: Forks, overrides: list[str], environment: dict[str, str], answer: list[str]
):
    ended = python.run("-m", "trainer", *overrides, cwd=tmp_path, environment=environment)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    for part in answer:
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def problems(*overrides: str, on: Machine) -> str:
    """What the checks say of a config, or nothing."""
    try:
        load(list(overrides), lambda config: validate.validate(config, on))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_machine_starts_64_tasks_a_core():
    fits, too_many = "cluster=64ps64w", "cluster=65ps64w"
    assert problems(fits, on=SMALL) == ""
    assert problems(too_many, on=SMALL) == (
        "cluster: cluster=65ps64w is 129 tasks on 2 cores; this machine starts 128 at most, 64 a core\n"
        "    e.g. cluster=2ps4w; for tasks on several machines give cluster.hosts"
    )
    assert problems(too_many, on=Machine(cores=4, gpus=0)) == ""


def test_the_number_of_tasks_with_addresses_is_not_limited():
    listed = {job: [f"10.{place}.{i}.1:2222" for i in range(64)] for place, job in enumerate(("ps", "worker"))}
    listed_addresses = ",".join(f"{job}:[{','.join(listed[job])}]" for job in listed)
    assert problems("cluster=64ps64w", f"cluster.addresses={{{listed_addresses}}}", on=Machine(cores=1, gpus=0)) == ""


def test_a_limit_of_open_files_that_is_too_low_is_refused():
    assert problems("cluster=2ps4w", on=Machine(cores=2, gpus=0, files=50)) == ""
    assert problems("cluster=2ps4w", on=Machine(cores=2, gpus=0, files=49)) == (
        "ulimit -n: a process may open 49 files, and 6 tasks need about 50\n"
        "    type ulimit -n 1024, or choose a smaller cluster="
    )


def test_a_limit_of_threads_that_is_too_low_is_refused():
    assert problems("cluster=2ps4w", on=Machine(cores=2, gpus=0, threads=300)) == ""
    assert problems("cluster=2ps4w", on=Machine(cores=2, gpus=0, threads=299)) == (
        "ulimit -u: 299 threads may run here, and 6 tasks have about 300\n"
        "    choose a smaller cluster=, or allow more: ulimit -u 300, docker run --pids-limit 300, "
        "sysctl kernel.pid_max=300"
    )


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            "{evaluator:1}",
            "restart.max_of.evaluator: 'evaluator' is neither a job nor a task of the cluster; available: ps (ps:0), "
            "worker (worker:0..1)\n    leave it out, or choose a cluster with evaluator tasks",
        ),
        (
            "{worker\\:2:1}",
            "restart.max_of.worker:2: 'worker:2' is neither a job nor a task of the cluster; available: ps (ps:0), "
            "worker (worker:0..1)\n    e.g. 'restart.max_of={worker\\:1:1}'",
        ),
        (
            "{ps:-1}",
            "restart.max_of.ps: -1 is out of range; it must be at least 0, for a task that is never restarted\n"
            "    e.g. 'restart.max_of={ps:0}'",
        ),
        ("{ps:0,worker\\:1:9}", ""),
    ],
)
def test_a_number_of_restarts_is_of_a_job_or_a_task(entry, says):
    assert problems("cluster=1ps2w", f"restart.max_of={entry}", on=SMALL) == says
