"""Operations with side effects that need not wait for each other.

TensorFlow runs the operations of a function that have side effects one after another, in the order of the program. For
those that name no resource, it does not matter whether they have anything to do with each other, nor where they are:
each waits for a message of the task that had the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def after(tensor: tf.Tensor, what: Iterable[Any]) -> tf.Tensor:
    """A tensor as soon as other things are there, too.

    To have an operation wait by `tf.control_dependencies` is not always enough: of one whose inputs are made within the
    context, only these wait, down to a slice's constant numbers, and TensorFlow's optimizer, which takes an element of
    a stack from where it came, forgets what those wait for.

    Args:
        tensor: made before.
        what: operations and tensors.
    """
    with tf.control_dependencies(list(what)):
        return tf.identity(tensor)


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


def in_rows(
    goes_on: Callable[..., tf.Tensor],
    several: Callable[..., tf.Tensor],
    row: Callable[..., list[Any]],
    single: Callable[..., list[Any]],
    start: list[Any],
) -> None:
    """Goes on in rows as long as it is sure that several follow each other, and else one by one.

    Two loops within one: a condition that chose between the two would cost three times the messages of a loop's turn.

    Args:
        goes_on: from what is carried, whether to go on at all.
        several: whether with a row.
        row: several steps.
        single: one.
        start: what is carried first.
    """

    def alone(*carried: Any) -> tf.Tensor:
        return tf.logical_and(goes_on(*carried), tf.logical_not(several(*carried)))

    def both(*carried: Any) -> Any:
        carried = tf.while_loop(several, row, carried, parallel_iterations=1)
        return tf.while_loop(alone, single, carried, parallel_iterations=1)

    tf.while_loop(goes_on, both, start, parallel_iterations=1)
