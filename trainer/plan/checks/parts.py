"""Checks whether a loss may be computed on parts of a batch: on several replicas, or one part after the other."""

from collections.abc import Iterator, Sequence

from trainer.faults.problems import Problem
from trainer.plan.description import Description
from trainer.plan.plan import Task
from trainer.plan.strategy import Strategy


def check_exchanges(tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    """Refuses exchanges between replicas unless there is only one: a replica step depends on its own batch only."""
    replicas = sum(len(task.replicas) for task in tasks)
    if description.exchanging and replicas > 1:
        message = (
            f"{', '.join(description.exchanging)}: exchanges values with other replicas during a step, because of "
            f"synchronized=True or a call to all_reduce, which works with one replica only; this run has {replicas}"
        )
        remedy = "type cluster=local, or train without it, e.g. with synchronized=False"
        yield Problem("cluster", "not-supported", message, remedy)


def averaged(tasks: Sequence[Task], strategy: Strategy) -> int:
    """Returns the number of replicas over which an update averages."""
    replicas = [len(task.replicas) for task in tasks]
    return max(replicas) if strategy.waits_for_one else sum(replicas)


def is_counted(replicas: int, description: Description) -> bool:
    """Whether the mean over replicas must weight each by the count that its loss is divided by."""
    return replicas > 1 and description.counts == 1 and description.is_one_mean


def warn_of_parts(replicas: int, accumulate: int, description: Description) -> Iterator[Problem]:
    """Warns if the mean over parts differs from that over all examples: the loss is not a mean, or counts differ."""
    parts = replicas * accumulate
    if parts == 1:
        return
    if description.is_summed:
        message = f"the loss is a sum over examples, and an update takes the mean over {parts} parts of them"
        remedy = f"multiply optimizer.learning_rate by {parts} for the update of the whole batch, or use a mean"
        yield Problem("model", "depends-on-parts", message, remedy)
    for scalar in description.scalars:
        message = (
            f"{scalar}: returns one number for each of the {parts} parts of a batch, and an update takes their mean, "
            "which equals the value for the whole batch only if every number is a mean over the same count"
        )
        remedy = f"return one loss per example, [N]; multiply what is a sum, as activity_regularizer is, by {parts}"
        yield Problem("model", "depends-on-parts", message, remedy)
    for mixing in description.mixing:
        message = (
            f"{mixing}: its result for an example depends on the others of the batch, and each of the {parts} parts of "
            "a batch is computed separately, as under tf.distribute; the whole batch at once would give another result"
        )
        remedy = "to compute the whole batch at once, type cluster=local without train.accumulate"
        yield Problem("model", "depends-on-parts", message, remedy)
    if replicas > 1 and description.counts and not description.is_one_mean:
        message = (
            "the losses of several outputs are divided by different counts of masks or weights, and an update takes "
            f"the mean over {replicas} replicas, as with tf.distribute; the loss of the whole batch would differ"
        )
        remedy = "type cluster=local train.accumulate=N, which weights each output by its count"
        yield Problem("model", "depends-on-parts", message, remedy)
