"""Which of TensorFlow's executors runs a function: the usual one, or one that carries out operations one by one.

The usual one hands operations that could run at the same time to a pool of threads. Where a task has a single thread
for an operation, since others share the cores, that wakes threads and makes nothing faster.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf

SINGLE_THREADED = "SINGLE_THREADED_EXECUTOR"


def may_run_in_order(function: Any, *args: Any) -> bool:
    """Whether the other executor may be tried for a function.

    Args:
        function: a `tf.function` whose operations need not run at the same time.
        args: what it is called with; it is traced for that here.
    """
    one_thread = os.environ.get("TF_NUM_INTRAOP_THREADS") == "1"
    gpus = tf.config.list_logical_devices("GPU")
    return one_thread and not gpus and not _jumps(function.get_concrete_function(*args).graph)


def rehearse(function: Any, nothing: tf.data.Dataset, *args: Any) -> None:
    """Has the other executor take a function, which reads data before it does anything else, and do nothing of it.

    What TensorFlow makes of a graph, such as variables that some of its optimizations add, shows only then.

    Args:
        function: a `tf.function` that takes an iterator.
        nothing: a dataset without elements, of the iterator's types.
        args: what the function takes behind the iterator.

    Raises:
        tf.errors.OpError: it cannot.
    """
    with tf.experimental.function_executor_type(SINGLE_THREADED), contextlib.suppress(tf.errors.OutOfRangeError):
        function(iter(nothing), *args)


def _jumps(graph: Any) -> bool:
    """Whether a graph has loops or conditions that become jumps between its operations.

    Those are what the other executor cannot do.
    """
    written = graph.as_graph_def()
    functions = [function.node_def for function in written.library.function]
    return any(node.attr["_lower_using_switch_merge"].b for nodes in (written.node, *functions) for node in nodes)
