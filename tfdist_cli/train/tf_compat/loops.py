"""Loops within functions that run on several tasks.

A condition in such a function, and each turn of a loop, cost some messages to every task in it. So where it is sure
that several steps follow each other, they stand in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


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
