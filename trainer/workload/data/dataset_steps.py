"""Inspects the steps of a tf.data.Dataset: their order, the state that they change, their Python code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trainer.workload.data.arrays import SMALL_NBYTES

if TYPE_CHECKING:
    import tensorflow as tf

# Operations of TensorFlow that change a state.
CHANGES = re.compile("Assign|Multinomial|Parameterized|Random|Rng|SampleDistorted|Stateful(?!Partitioned)|Truncated")
IGNORED = 1  # TensorFlow's value for ignoring generators and files when it serializes a dataset


def has_unordered_step(dataset: tf.data.Dataset) -> bool:
    """Whether a transformation has deterministic=False, which no option of the whole dataset overrides."""
    import tensorflow as tf

    steps = steps_of(dataset)
    functions = _functions_of(steps)
    if any(getattr(step, "_deterministic", "") == "false" for step in steps):
        return True
    graphs = [function.graph.as_graph_def() for function in functions]
    if any("ParallelInterleave" in type(step).__name__ for step in steps):  # keeps it in the graph of the whole alone
        tensors = [one for step in steps for one in getattr(step, "_tensors", ())]
        tensors += [one for function in functions for one in function.captured_inputs if hasattr(one, "numpy")]
        if sum(one.dtype.size * one.shape.num_elements() for one in tensors) <= SMALL_NBYTES:  # they are copied into it
            whole = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset._variant_tensor, external_state_policy=IGNORED)
            graphs.append(tf.compat.v1.GraphDef.FromString(whole.numpy()))
    nodes = (node for graph in graphs for node in _nodes_of(graph))
    return any("deterministic" in node.attr and node.attr["deterministic"].s == b"false" for node in nodes)


def in_sequence(dataset: tf.data.Dataset, *, always: bool = False) -> tf.data.Dataset:
    """Returns the dataset with elements that draw random numbers and change variables one after the other.

    In parallel calls, threads would decide which element draws which number.

    Args:
        always: whether it does so in Python, which the dataset does not show; nothing is prefetched then.
    """
    import tensorflow as tf

    from trainer.workload.tensorflow_internals import VariantDataset

    if not always and next(_changing(steps_of(dataset)), None) is None:
        return dataset
    rewritten = tf.raw_ops.OptimizeDatasetV2(
        input_dataset=dataset._variant_tensor,
        optimizations_enabled=["make_deterministic"],
        optimizations_disabled=[],
        optimizations_default=[],
        **dataset._flat_structure,
    )
    options = tf.data.Options()
    if always:  # other rewrites would read ahead again
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.inject_prefetch = False
        options.autotune.enabled = False
    return VariantDataset(rewritten, dataset.element_spec).with_options(options)


def _changing(steps: Iterable[tf.data.Dataset]) -> Iterator[Any]:
    """Yields the functions of steps whose calls change a state: of a generator or a variable."""
    for function in _functions_of(steps):
        if any(CHANGES.match(node.op) for node in _nodes_of(function.graph.as_graph_def())):
            yield function


def _functions_of(steps: Iterable[tf.data.Dataset]) -> list[Any]:
    return [one.function for step in steps for one in step._functions()]


def _nodes_of(graph: Any) -> tuple[Any, ...]:
    return (*graph.node, *(inner for function in graph.library.function for inner in function.node_def))


def steps_of(dataset: tf.data.Dataset, *, behind_caches: bool = True) -> list[tf.data.Dataset]:
    """Returns a dataset and all datasets that it is built from, or only those that every pass reads again."""
    steps = [dataset]
    for step in steps:
        steps += step._inputs() if behind_caches or not is_cache(step) else []
    return steps


def is_cache(step: tf.data.Dataset) -> bool:
    return type(step).__name__ == "CacheDataset"


def share_order(train: Any, evaluate: Any) -> bool:
    """Whether both are datasets that share a shuffle() which reorders every pass: reading one reorders the other."""
    if not is_dataset(train) or not is_dataset(evaluate):
        return False
    return bool(_reshuffling(train) & _reshuffling(evaluate))


def share_state(train: Any, evaluate: Any) -> bool:
    """Whether both are datasets, and reading one changes the elements of the other, e.g. by a shared generator."""
    if not is_dataset(train) or not is_dataset(evaluate):
        return False
    return share_order(train, evaluate) or bool(_changed(train) & _changed(evaluate))


def _changed(dataset: tf.data.Dataset) -> set[int]:
    """Returns the ids of generators and variables that every pass changes."""
    steps = steps_of(dataset)
    captured = [one for function in _changing(steps) for one in function.captured_inputs]
    drawn = [step for step in steps if getattr(step, "_rerandomize", False)]
    return {*map(id, drawn), *(id(one) for one in captured if one.dtype.name == "resource")}


def _reshuffling(dataset: tf.data.Dataset) -> set[int]:
    """Returns the ids of shuffles that reorder every pass, except those whose order a cache() keeps."""
    steps = steps_of(dataset, behind_caches=False)
    return {id(step) for step in steps if getattr(step, "_reshuffle_each_iteration", False)}


def python_in(steps: Iterable[tf.data.Dataset]) -> list[Any]:
    """Returns the Python functions that steps of a pipeline call, e.g. those of from_generator and numpy_function."""
    from trainer.workload.tensorflow_internals import python_functions

    nodes = (node for function in _functions_of(steps) for node in _nodes_of(function.graph.as_graph_def()))
    tokens = (node.attr["token"].s.decode() for node in nodes if "PyFunc" in node.op)
    return [one for one in map(python_functions._funcs.get, dict.fromkeys(tokens)) if one is not None]


def is_dataset(source: Any) -> bool:
    import tensorflow as tf

    return isinstance(source, tf.data.Dataset)
