"""One Session.run that also tells what ran where."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.observe.placement.executed import Executed, executed

v1 = tf.compat.v1


def run_traced(session: Any, fetches: Any, feeds: dict[Any, Any]) -> tuple[Any, Executed]:
    """Returns what was fetched, and the graph that was executed for it."""
    options, metadata = v1.RunOptions(output_partition_graphs=True), v1.RunMetadata()
    fetched = session.run(fetches, feeds, options=options, run_metadata=metadata)
    return fetched, executed(metadata, session.graph.as_graph_def().library)
