"""What it means for a model's loss that its batch is computed in parts: on several replicas, or one after the other."""

from collections.abc import Iterator, Sequence

from trainer.faults.problems import Problem
from trainer.plan.description import Description
from trainer.plan.plan import Task
from trainer.plan.strategy import Strategy


def check_exchanges(tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    """A replica step is a function of its own batch; only one replica alone has all that there is to exchange."""
    replicas = sum(len(task.replicas) for task in tasks)
    if description.exchanging and replicas > 1:
        message = (
            f"{', '.join(description.exchanging)}: exchanges values with other replicas while it computes, because of "
            f"synchronized=True or a call of all_reduce, which works with one replica only; this run has {replicas}"
        )
        yield Problem("cluster", message, "type cluster=local, or train without it, e.g. with synchronized=False")


def averaged(tasks: Sequence[Task], strategy: Strategy) -> int:
    """Replicas of which an update takes the mean."""
    replicas = [len(task.replicas) for task in tasks]
    return max(replicas) if strategy.waits_for_one else sum(replicas)


def is_counted(replicas: int, description: Description) -> bool:
    """Whether the mean over replicas must count each as often as what its loss is a mean over."""
    return replicas > 1 and description.counts == 1 and description.is_one_mean


def warn_of_parts(replicas: int, accumulate: int, description: Description) -> Iterator[Problem]:
    """A mean over parts is that over all examples only if each part's loss is a mean, over as much as the others'."""
    parts = replicas * accumulate
    if parts == 1:
        return
    if description.is_summed:
        message = f"the loss is a sum over examples, and an update takes the mean over {parts} parts of them"
        remedy = f"multiply optimizer.learning_rate by {parts} for the update of the whole batch, or use a mean"
        yield Problem("model", message, remedy)
    for scalar in description.scalars:
        message = (
            f"{scalar}: returns one number for each of the {parts} parts of a batch, and an update takes their mean, "
            "which is the whole batch's only if each number is a mean over equally much"
        )
        yield Problem("model", message, "return a loss for each example, [N], and no mean of your own")
    if replicas > 1 and description.counts and not description.is_one_mean:
        message = (
            "the losses of several outputs are means over different counts, of masks or weights, and an update takes "
            f"the mean over {replicas} replicas, as strategies of Keras do; the whole batch would count them otherwise"
        )
        yield Problem("model", message, "type cluster=local train.accumulate=N, which counts each output on its own")
