"""A model whose parameters count how often training used each example, instead of learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def oracle(input_shape: tuple[int, ...], classes: int, *, examples: int = 96, parts: int = 2) -> keras.Model:
    """Counts the examples of data=oracle, if optimizer=sgd has a learning_rate equal to train.batch_size.

    The gradient of an example's count is -1 / (examples in the replica's batch) for each time that it is in the batch.
    The mean over the replicas is -1 / train.batch_size for each time in the global batch, so an update adds exactly 1.

    Args:
        input_shape: [1], the number of one example.
        classes: logits of one example; they are 0, and so is their gradient.
        examples: of the data set.
        parts: number of parameters that all count the same, so that each of as many shards has one.

    Returns:
        A model from [N, 1] to logits [N, classes] with the parameters counts_0/counts, counts_1/counts, ... [examples].
    """
    if tuple(input_shape) != (1,):
        raise ValueError(
            f"model oracle takes the number of an example, [1], but the data has {list(input_shape)}; type data=oracle"
        )
    if examples < 1 or parts < 1:
        raise ValueError(f"model oracle has examples={examples} and parts={parts}; both must be at least 1")
    import keras

    from trainer.workload.models.counts import Counts

    numbers = passed = keras.Input(input_shape, name="number")
    for part in range(parts):
        passed = Counts(examples, name=f"counts_{part}")(passed)
    logits = keras.ops.repeat(keras.ops.zeros_like(passed), classes, axis=1)
    return keras.Model(numbers, logits, name="oracle")
