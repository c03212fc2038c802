"""What a run says when it continues from a checkpoint that summed gradients differently."""

from pathlib import Path

import pytest
from quick_config import load

from trainer.plan import spans
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan
from trainer.storage import resume
from trainer.storage.checkpoint import Checkpoint


def planned(cluster: str) -> Plan:
    return make_plan(load([*cluster.split(), "train.batch_size=24"]), MODEL, Machine(cores=8, gpus=0))


MODEL = Description((Parameter("dense/kernel", (784, 128), True),), 10, 8000, 2000)
NEW = {"replicas": 4, "order": spans.ORDER}
SAME = {
    "one replica": ("cluster=local", {"replicas": 1}),
    "other workers": ("cluster=1ps2w train.replicas=4", NEW),
    "two replicas of an earlier version": ("cluster=1ps2w", {"replicas": 2}),
    "not repeatable": ("cluster=1ps4w strategy=async", {"replicas": 2}),
}
DIFFERENT = {"other replicas": ("cluster=1ps3w", NEW), "an earlier version": ("cluster=1ps4w", {"replicas": 4})}


@pytest.mark.parametrize("case", SAME)
def test_a_run_that_sums_as_before_says_nothing(case):
    cluster, facts = SAME[case]
    assert resume.change_of_sums(checkpoint(facts), planned(cluster)) == ""


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_run_that_sums_in_another_order_says_why(case, snapshot):
    cluster, facts = DIFFERENT[case]
    assert resume.change_of_sums(checkpoint(facts), planned(cluster)) == snapshot


def checkpoint(facts: dict[str, int]) -> Checkpoint:
    return Checkpoint(20, 1, Path("checkpoints/20"), facts, {}, {}, {})
