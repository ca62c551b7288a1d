"""Control dependencies and loops in functions that run on several tasks.

TensorFlow runs the stateful operations of a function one after another, in the order of the program. It does so also
for operations without a common resource, and on different tasks: each one then waits for a message from the task of the
one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


def unordered(result: Any) -> Any:
    """Lets an operation run as soon as its inputs are ready. The function still waits for it before it returns.

    Args:
        result: the operation, or one or several tensors that it returns.

    Returns:
        `result`.
    """
    if not tf.executing_eagerly():
        (first, *_) = tf.nest.flatten(result)
        operation = getattr(first, "op", first)
        manager = operation.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(operation)
    return result


def after(tensor: tf.Tensor, what: Iterable[Any]) -> tf.Tensor:
    """Returns a tensor that is ready only after other operations.

    `tf.control_dependencies` alone is not always enough. If the inputs of an operation are made within the context,
    only these inputs wait, for example the constants of a slice. TensorFlow's graph optimizer replaces an element of a
    stack by the stacked tensor, and drops the control dependencies of these constants.

    Args:
        tensor: a tensor that was made before.
        what: the operations and tensors to wait for.
    """
    with tf.control_dependencies(list(what)):
        return tf.identity(tensor)


@contextmanager
def changes() -> Iterator[list[tf.Operation]]:
    """Yields a list that has, at the end of the context, the operations within it that may change something."""
    graph = tf.compat.v1.get_default_graph()
    begin = len(graph.get_operations())
    found: list[tf.Operation] = []
    yield found
    found += [each for each in graph.get_operations()[begin:] if each.op_def.is_stateful]


def last_of(kind: str) -> list[Any]:
    """Returns the latest operation of a kind in the function that is being traced, for the next one to wait for.

    Returns:
        A list to store the operation in; the next call returns the same list. Outside of functions, a new empty list.
    """
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    found = graph.get_collection_ref(f"tfdist: {kind}")
    found[:] = [
        operation for operation in found if operation.graph is graph
    ]  # a function inherits its caller's collections
    return found


def made_once(key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns a tensor that is the same wherever a function needs it; the function's graph has its operations once.

    Args:
        key: stands for the value and its device.
        make: makes the tensor, which waits for its inputs alone: control dependencies are those of the first use.
    """
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    made = graph.get_collection_ref("tfdist: made once")
    for known, tensor in made:
        if known == key and tensor.graph is graph:  # a function inherits its caller's collections
            return tensor
    with tf.control_dependencies(None):
        tensor = make()
    made.append((key, tensor))
    return tensor


def in_rows(
    goes_on: Callable[..., tf.Tensor],
    several: Callable[..., tf.Tensor],
    row: Callable[..., list[Any]],
    single: Callable[..., list[Any]],
    start: list[Any],
) -> list[Any]:
    """Runs steps in unrolled groups while several are certain to follow each other, and one by one otherwise.

    Each iteration of a loop over several tasks, and each condition in it, costs messages to every task. So groups of
    steps are unrolled. There are two loops within one: a condition that chose between a group and a single step would
    cost three times the messages of an iteration.

    Args:
        goes_on: loop variables → whether to continue at all.
        several: loop variables → whether to continue with a group.
        row: loop variables → loop variables, for a group of steps.
        single: loop variables → loop variables, for one step.
        start: the loop variables at the start.

    Returns:
        The loop variables at the end.
    """

    def alone(*carried: Any) -> tf.Tensor:
        return tf.logical_and(goes_on(*carried), tf.logical_not(several(*carried)))

    def both(*carried: Any) -> Any:
        carried = tf.while_loop(several, row, carried, parallel_iterations=1)
        return tf.while_loop(alone, single, carried, parallel_iterations=1)

    return list(tf.while_loop(goes_on, both, start, parallel_iterations=1))
