"""Operations with side effects that need not wait for each other.

TensorFlow runs the operations of a function that have side effects one after another, in the order of the program. For
those that name no resource, it does not matter whether they have anything to do with each other, nor where they are:
each waits for a message of the task that had the one before.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def unordered(result: Any) -> Any:
    """Lets an operation run as soon as its own inputs are there; a function still waits for it before it ends.

    Args:
        result: a tensor that it gives, several, or the operation.

    Returns:
        The same.
    """
    if not tf.executing_eagerly():
        (first, *_) = tf.nest.flatten(result)
        operation = getattr(first, "op", first)
        manager = operation.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(operation)
    return result


def last_of(kind: str) -> list[Any]:
    """What of a kind was the last so far in the function that is being traced, for the next one to wait for.

    Returns:
        A list to keep it in, which the next call gives again; outside of functions an empty one, each time.
    """
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    found = graph.get_collection_ref(f"tfdist: {kind}")
    found[:] = [operation for operation in found if operation.graph is graph]  # a function takes over its caller's
    return found
