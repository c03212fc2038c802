"""Addresses and roles: every entry of the cluster's bad inputs, and the good ones beside them."""

from __future__ import annotations

import json

import pytest
from quick_config import load, validated_on
from snapshots import cases

from trainer.config.schema import RunConfig
from trainer.plan import resolve
from trainer.plan.devices import Machine
from trainer.storage.run_directory import config_hash

MACHINE = Machine(cores=2, gpus=0)
GOOD = {"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}


def validated(*overrides: str, machine: Machine = MACHINE) -> RunConfig:
    return load(list(overrides), validated_on(machine))


def with_addresses(ps: str = "10.0.0.1:2222", workers: str = "10.0.0.2:2222,10.0.0.3:2222") -> list[str]:
    return ["cluster=1ps2w", f"+cluster.addresses.ps=[{ps}]", f"+cluster.addresses.worker=[{workers}]"]


def test_a_cluster_with_addresses_of_its_own_is_accepted():
    validated(*with_addresses())


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2ps", "0ps4w", "2ps0w", "w4", "4", "2ps4w0e", "02ps4w", "2pss4w", "2PS4W"])
def test_a_bad_size_is_refused_with_the_nearest(refused, size):
    refused("cluster/malformed", validated, f"cluster={size}")


BAD_ADDRESSES = {
    "cluster.addresses.chief/unknown-choice": {
        "an unknown job in the addresses": [*with_addresses(), "+cluster.addresses.chief=[10.0.0.9:2222]"]
    },
    "cluster.addresses.ps/malformed": {
        "a scheme": with_addresses(ps="'http://10.0.0.1:2223/x'"),
        "an address without a port": with_addresses(ps="10.0.0.1"),
    },
    "cluster.addresses.worker/mismatch": {"every task needs an address": with_addresses(workers="10.0.0.2:2222")},
    "cluster.addresses.worker/taken": {
        "an address listed twice": with_addresses(workers="10.0.0.1:2222,10.0.0.3:2222"),
        "localhost is the loopback address": with_addresses(
            ps="127.0.0.1:2222", workers="localhost:2222,localhost:2223"
        ),
        "a port that another task needs for its status page": with_addresses(
            ps="127.0.0.1:2222", workers="127.0.0.1:3222,127.0.0.1:2223"
        ),
    },
    "cluster/unknown-choice": {"an empty size": ["cluster="]},
    "job/not-set": {"a task started alone needs addresses": ["cluster=1ps2w", "job=worker", "task=0"]},
    "job/unknown-choice": {"an unknown job": [*with_addresses(), "job=chief", "task=0"]},
    "task/out-of-range": {
        "an index out of range": [*with_addresses(), "job=worker", "task=2"],
        "a cluster without an evaluator cannot run one": [
            *with_addresses(),
            "job=evaluator",
            "task=0",
            "run=/shared/mine",
        ],
    },
}


@pytest.mark.parametrize(("codes", "overrides"), cases(BAD_ADDRESSES))
def test_bad_addresses_and_roles_are_refused(refused, codes, overrides):
    refused(codes, validated, *overrides)


def test_one_evaluator_is_enough(refused):
    validated("cluster=2ps4w1e")
    refused("cluster/out-of-range", validated, "cluster=2ps4w3e")


@pytest.mark.parametrize("port", ["0", "99999", "http", "-1", "２２２２"])
def test_a_port_out_of_range_is_refused(port, refused):
    refused("cluster.addresses.ps/malformed", validated, *with_addresses(ps=f"'10.0.0.1:{port}'"))


def test_a_public_address_needs_consent(refused):
    public = with_addresses(ps="8.8.8.8:2222")
    refused("cluster.addresses.ps/unsafe", validated, *public)
    validated(*public, "security.allow_untrusted_network=true")


def test_a_job_needs_a_task_and_a_task_a_job(refused):
    refused("task/out-of-range", validated, *with_addresses(), "job=ps")
    refused("job/unknown-choice", validated, *with_addresses(), "task=1")


def test_an_evaluator_needs_no_address():
    validated("cluster=1ps2w1e", *with_addresses()[1:])


def test_an_evaluator_that_is_started_by_hand_needs_the_directory_of_the_chief(refused):
    by_hand = ["cluster=1ps2w1e", *with_addresses()[1:], "job=evaluator", "task=0"]
    refused("run/not-set", validated, *by_hand)
    validated(*by_hand, "run=/shared/mine")


def adopt(value: object, *overrides: str) -> tuple[str, object]:
    text = value if isinstance(value, str) else json.dumps(value)
    config, answer = resolve.resolve(load(list(overrides)), {"TF_CONFIG": text})
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
    "value",
    [
        "{",
        [1],
        "null",
        {"cluster": GOOD},
        {"task": {"type": "worker", "index": 0}},
        {"cluster": {"ps": "a:1"}, "task": {"type": "ps", "index": 0}},
        {"cluster": GOOD, "task": {"type": "worker", "index": 2}},
        {"cluster": GOOD, "task": {"type": "chief", "index": 0}},
        {"cluster": GOOD, "task": {"type": "worker", "index": -1}},
        {"cluster": GOOD, "task": {"type": "worker", "index": "x"}},
        {"cluster": GOOD, "task": {"type": "worker", "index": 0.5}},
        {"cluster": {"worker": []}, "task": {"type": "worker"}},
        {"cluster": {"ps": ["a:1"]}, "task": {"type": "ps"}},
        {"cluster": GOOD | {"gpu": ["a:1"]}, "task": {"type": "ps"}},
        {"cluster": GOOD, "task": {"type": "evaluator", "index": 1}},
    ],
    ids=[
        "not JSON", "a list", "null", "no task", "no cluster", "no list", "index", "no such task", "negative", "text",
        "a part", "no workers", "no worker", "job", "a second evaluator",
    ],
)  # fmt: skip
def test_an_invalid_tf_config_is_refused(value, snapshot):
    answer, _ = adopt(value)
    assert answer == snapshot


def test_a_tf_config_that_contradicts_the_command_line_is_refused(snapshot):
    answer, _ = adopt({"cluster": GOOD, "task": {"type": "ps", "index": 0}}, "cluster=2ps4w")
    assert answer == snapshot


def test_a_tf_config_with_an_evaluator_missing_on_the_command_line_is_refused(snapshot):
    cluster = GOOD | {"evaluator": ["10.0.0.9:2222"]}
    answer, _ = adopt({"cluster": cluster, "task": {"type": "ps", "index": 0}}, "cluster=1ps2w")
    assert answer == snapshot
