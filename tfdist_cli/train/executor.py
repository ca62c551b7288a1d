"""Which of TensorFlow's executors runs a function: the usual one, or one that carries out operations one by one.

The usual one hands operations that could run at the same time to a pool of threads. Where a task has a single thread
for an operation, since others share the cores, that wakes threads and makes nothing faster.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf


def executor_of(function: Any, *args: Any) -> str:
    """The executor to call a function with, for `tf.experimental.function_executor_type`.

    Args:
        function: a `tf.function` whose operations need not run at the same time.
        args: what it is called with; it is traced for that here.

    Returns:
        Its name; empty for the usual one.
    """
    one_thread = os.environ.get("TF_NUM_INTRAOP_THREADS") == "1"
    if not one_thread or tf.config.list_logical_devices("GPU") or _jumps(function.get_concrete_function(*args).graph):
        return ""
    return "SINGLE_THREADED_EXECUTOR"


def _jumps(graph: Any) -> bool:
    """Whether a graph has loops or conditions that become jumps between its operations.

    Those are what the other executor cannot do.
    """
    written = graph.as_graph_def()
    functions = [function.node_def for function in written.library.function]
    return any(node.attr["_lower_using_switch_merge"].b for nodes in (written.node, *functions) for node in nodes)
