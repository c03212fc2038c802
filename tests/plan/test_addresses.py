"""Addresses and roles: every entry of the cluster's bad inputs, and the good ones beside them."""

from __future__ import annotations

import json

import pytest
from quick_config import load

from trainer.faults.problems import ConfigError
from trainer.plan import tf_config, validate
from trainer.plan.devices import Machine
from trainer.storage.run_directory import config_hash

MACHINE = Machine(cores=2, gpus=0)
GOOD = {"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}


def problems(*overrides: str, machine: Machine = MACHINE) -> str:
    """What the checks say of a config, or nothing."""
    try:
        load(list(overrides), lambda config: validate.validate(config, machine))
    except ConfigError as error:
        return str(error)
    return ""


def with_addresses(ps: str = "10.0.0.1:2222", workers: str = "10.0.0.2:2222,10.0.0.3:2222") -> list[str]:
    return ["cluster=1ps2w", f"+cluster.addresses.ps=[{ps}]", f"+cluster.addresses.worker=[{workers}]"]


def test_a_cluster_with_addresses_of_its_own_is_accepted():
    assert problems(*with_addresses()) == ""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2ps", "0ps4w", "2ps0w", "w4", "4", "2ps4w0e", "02ps4w", "2pss4w", "2PS4W", ""])
def test_a_bad_size_is_refused_with_the_nearest(size):
    answer = problems(f"cluster={size}")
    assert answer.startswith(f"cluster={size}: ")
    assert "cluster=" in answer.splitlines()[1]


def test_one_evaluator_is_enough():
    assert problems("cluster=2ps4w1e") == ""
    answer = problems("cluster=2ps4w3e")
    assert "one evaluator scores every checkpoint, but cluster=2ps4w3e has 3\n    type cluster=2ps4w1e" in answer


def test_an_address_listed_twice_names_both_places():
    answer = problems(*with_addresses(workers="10.0.0.1:2222,10.0.0.3:2222"))
    assert answer == (
        "cluster.addresses.worker[0]: 10.0.0.1:2222 of cluster.addresses.worker[0] is also cluster.addresses.ps[0]\n"
        "    e.g. 10.0.0.1:2223; the status page is 1000 above"
    )


def test_localhost_is_the_loopback_address():
    answer = problems(*with_addresses(ps="127.0.0.1:2222", workers="localhost:2222,localhost:2223"))
    assert "127.0.0.1:2222 of cluster.addresses.worker[0] is also cluster.addresses.ps[0]" in answer


def test_a_port_that_another_task_needs_for_its_status_page_is_refused():
    answer = problems(*with_addresses(ps="127.0.0.1:2222", workers="127.0.0.1:3222,127.0.0.1:2223"))
    assert "127.0.0.1:3222 of cluster.addresses.worker[0] is also the status page of cluster.addresses.ps[0]" in answer


@pytest.mark.parametrize("port", ["0", "99999", "http", "-1", "２２２２"])
def test_a_port_out_of_range_is_refused(port):
    assert problems(*with_addresses(ps=f"'10.0.0.1:{port}'")) == (
        f"cluster.addresses.ps[0]: '10.0.0.1:{port}' has port '{port}'; a port is a number from 1 to 64535\n"
        "    e.g. 10.0.0.1:2222"
    )


def test_a_scheme_is_refused():
    assert problems(*with_addresses(ps="'http://10.0.0.1:2223/x'")) == (
        "cluster.addresses.ps[0]: 'http://10.0.0.1:2223/x' has a scheme; write host:port, without http://\n"
        "    e.g. 10.0.0.1:2223"
    )


def test_an_address_without_a_port_is_refused():
    answer = problems(*with_addresses(ps="10.0.0.1"))
    assert answer == "cluster.addresses.ps[0]: '10.0.0.1' is not host:port\n    e.g. 10.0.0.1:2222"


def test_every_task_needs_an_address():
    answer = problems(*with_addresses(workers="10.0.0.2:2222"))
    assert "1 addresses for 2 worker tasks\n    give 2 addresses, or type cluster=1ps1w" in answer


def test_an_unknown_job_in_the_addresses_is_refused():
    assert "'chief' is not a job; available: ps, worker, evaluator" in problems(
        *with_addresses(), "+cluster.addresses.chief=[10.0.0.9:2222]"
    )


def test_a_public_address_needs_consent():
    public = with_addresses(ps="8.8.8.8:2222")
    assert "cluster.addresses.ps[0]: 8.8.8.8:2222 is a public address" in problems(*public)
    assert "use a private address, or security.allow_untrusted_network=true" in problems(*public)
    assert problems(*public, "security.allow_untrusted_network=true") == ""


def test_an_index_out_of_range_is_refused():
    answer = problems(*with_addresses(), "job=worker", "task=2")
    assert answer == "task: 2 is not a task of worker; worker has tasks 0..1\n    e.g. job=worker task=1"


def test_an_unknown_job_is_refused():
    answer = problems(*with_addresses(), "job=chief", "task=0")
    assert answer == "job: 'chief' is not a job; available: ps, worker, evaluator\n    e.g. job=worker task=0"


def test_a_job_needs_a_task_and_a_task_a_job():
    answer = problems(*with_addresses(), "job=ps")
    assert answer == "task: job=ps is given without a task; ps has tasks 0..0\n    e.g. job=ps task=0"
    answer = problems(*with_addresses(), "task=1")
    assert answer == "job: task=1 is given without a job; available: ps, worker, evaluator\n    e.g. job=worker task=1"


def test_an_evaluator_needs_no_address():
    assert problems("cluster=1ps2w1e", *with_addresses()[1:]) == ""


def test_an_evaluator_that_is_started_by_hand_needs_the_directory_of_the_chief():
    by_hand = ["cluster=1ps2w1e", *with_addresses()[1:], "job=evaluator", "task=0"]
    assert "run: evaluator:0 reads the checkpoints where the chief writes them, but no directory" in problems(*by_hand)
    assert problems(*by_hand, "run=/shared/mine") == ""


def test_a_cluster_without_an_evaluator_cannot_run_one():
    by_hand = [*with_addresses(), "job=evaluator", "task=0", "run=/shared/mine"]
    assert "0 is not a task of evaluator; the cluster has no evaluator" in problems(*by_hand)


def test_a_task_started_alone_needs_addresses():
    assert "the cluster has no addresses" in problems("cluster=1ps2w", "job=worker", "task=0")


def adopt(value: object, *overrides: str) -> tuple[str, object]:
    config = load(list(overrides))
    answer = tf_config.resolve_tf_config(config, value if isinstance(value, str) else json.dumps(value))
    return "\n".join(map(str, answer)), config


def test_a_role_is_taken_from_tf_config():
    answer, config = adopt({"cluster": GOOD, "task": {"type": "worker", "index": 1}})
    assert answer == ""
    assert (config.cluster.name, config.job, config.task) == ("1ps2w", "worker", 1)


def test_a_chief_entry_becomes_worker_0_and_the_workers_follow():
    cluster = {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"], "evaluator": ["10.0.0.9:2222"]}
    _, chief = adopt({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    _, worker = adopt({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    assert (chief.job, chief.task, worker.job, worker.task) == ("worker", 0, "worker", 1)
    assert worker.cluster.addresses["worker"] == ["10.0.0.1:2222", "10.0.0.2:2222"]


def test_a_listed_evaluator_is_known_to_all():
    cluster = GOOD | {"evaluator": ["10.0.0.9:2222"]}
    for job in ("ps", "evaluator"):
        answer, config = adopt({"cluster": cluster, "task": {"type": job, "index": 0}})
        assert answer == ""
        assert (config.job, config.task, config.cluster.name) == (job, 0, "1ps2w1e")
        assert config.cluster.addresses["evaluator"] == ["10.0.0.9:2222"]


def test_an_unlisted_evaluator_is_known_to_itself():
    _, evaluator = adopt({"cluster": GOOD, "task": {"type": "evaluator", "index": 0}})
    _, chief = adopt({"cluster": GOOD, "task": {"type": "worker", "index": 0}})
    assert (evaluator.job, evaluator.task, evaluator.cluster.name) == ("evaluator", 0, "1ps2w1e")
    assert (chief.cluster.name, chief.cluster.evaluator) == ("1ps2w", 0)
    assert config_hash(evaluator) == config_hash(chief)


def test_the_command_line_can_announce_an_unlisted_evaluator_to_all():
    for job in ("worker", "evaluator"):
        answer, config = adopt({"cluster": GOOD, "task": {"type": job, "index": 0}}, "cluster=1ps2w1e")
        assert answer == ""
        assert config.cluster.evaluator == 1


def test_an_evaluator_accepts_a_command_line_without_it():
    answer, config = adopt({"cluster": GOOD, "task": {"type": "evaluator", "index": 0}}, "cluster=1ps2w")
    assert answer == ""
    assert config.cluster.name == "1ps2w1e"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{", "it is not JSON"),
        ([1], "it is a JSON list, not an object with cluster and task"),
        ("null", "it is a JSON null, not an object with cluster and task"),
        ({"cluster": GOOD}, "it has no task"),
        ({"task": {"type": "worker", "index": 0}}, "its cluster is not an object of address lists"),
        ({"cluster": {"ps": "a:1"}, "task": {"type": "ps", "index": 0}}, "not an object of address lists"),
        ({"cluster": GOOD, "task": {"type": "worker", "index": 2}}, "its cluster has worker tasks 0..1"),
        ({"cluster": GOOD, "task": {"type": "chief", "index": 0}}, "its cluster has only ps, worker"),
        ({"cluster": GOOD, "task": {"type": "worker", "index": -1}}, "its cluster has worker tasks 0..1"),
        ({"cluster": GOOD, "task": {"type": "worker", "index": "x"}}, "its task index is 'x', not a number"),
        ({"cluster": GOOD, "task": {"type": "worker", "index": 0.5}}, "its task index is '0.5', not a number"),
        ({"cluster": {"worker": []}, "task": {"type": "worker"}}, "and its cluster has no worker tasks"),
        ({"cluster": {"ps": ["a:1"]}, "task": {"type": "ps"}}, "its cluster has no worker"),
        ({"cluster": GOOD | {"gpu": ["a:1"]}, "task": {"type": "ps"}}, "unknown jobs gpu"),
        ({"cluster": GOOD, "task": {"type": "evaluator", "index": 1}}, "its cluster has evaluator tasks 0..0"),
    ],
    ids=[
        "not JSON", "a list", "null", "no task", "no cluster", "no list", "index", "no such task", "negative", "text",
        "a part", "no workers", "no worker", "job", "a second evaluator",
    ],
)  # fmt: skip
def test_an_invalid_tf_config_is_refused(value, says):
    answer, _ = adopt(value)
    assert answer.startswith("TF_CONFIG: ")
    assert says in answer
    assert answer.splitlines()[1].startswith("    ")  # what to type


def test_a_tf_config_that_contradicts_the_command_line_is_refused():
    answer, _ = adopt({"cluster": GOOD, "task": {"type": "ps", "index": 0}}, "cluster=2ps4w")
    assert "it describes cluster 1ps2w, but the command line says cluster=2ps4w\n    leave cluster= out" in answer


def test_a_tf_config_with_an_evaluator_missing_on_the_command_line_is_refused():
    cluster = GOOD | {"evaluator": ["10.0.0.9:2222"]}
    answer, _ = adopt({"cluster": cluster, "task": {"type": "ps", "index": 0}}, "cluster=1ps2w")
    assert "it describes cluster 1ps2w1e, but the command line says cluster=1ps2w" in answer
