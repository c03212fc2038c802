"""Lists the tensors sent between tasks in a worker's step. Pure: no TensorFlow.

`tests/engine/test_messages.py` compares every line with what TensorFlow sends.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from trainer.plan.plan import Plan


class Message(NamedTuple):
    """A tensor that one task sends to another."""

    sender: str  # "worker:3"
    receiver: str  # "ps:0"
    nbytes: int  # 0: says only that something is done


def narrowest(plan: Plan) -> tuple[str, int]:
    """Returns the task that sends the most bytes in a step of all workers, and that number; it receives as many."""
    sent: Counter[str] = Counter()
    if plan.effective_strategy.has_ring:  # each worker sends to the next
        sent.update({link.split(" - ")[0]: nbytes for link, nbytes in plan.link_nbytes().items()})
    else:
        for message in (message for worker in plan.workers for message in of_step(plan, worker.name)):
            sent[message.sender] += message.nbytes
    return sent.most_common(1)[0]


def of_step(plan: Plan, worker: str) -> Iterator[Message]:
    """Yields the messages of a worker's step: the vector and the gradients of every shard on another task."""
    first, reached = plan.shards[0].host, set()
    for shard in plan.shards:
        if shard.host != worker:
            yield Message(shard.host, worker, plan.wire_format.nbytes(shard))
            yield Message(worker, shard.host, plan.vectors_of(plan.task_named(worker)) * plan.wire_format.nbytes(shard))
            if shard.host in reached:  # another bucket of that host, sent when the one before it is there
                yield Message(shard.host, worker, 0)
            reached.add(shard.host)
        if plan.effective_strategy.waits_for_quorum and shard.host != first:
            yield Message(shard.host, first, 0)  # the gradients are there: the first host may decide
