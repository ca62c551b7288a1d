"""The place of the largest score of each row, as Keras defines it: −0 is less than 0.

Keras first replaces each −0 by a small negative number, in five passes over all scores. That changes the result only
where the largest score is 0. So here, only such rows are looked at again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def of_rows(scores: tf.Tensor, by_keras: Callable[..., Any]) -> tf.Tensor:
    """Returns Keras's argmax over the last axis.

    Args:
        scores: (…, n) of a floating type; n is known.
        by_keras: Keras's own function, for the rows whose largest score is 0.

    Returns:
        (…), int32.
    """
    rows = tf.reshape(scores, [-1, scores.shape[-1]])
    found = tf.argmax(rows, axis=1, output_type=tf.int32)
    places = tf.stack([tf.range(tf.shape(found)[0]), found], axis=1)
    unsure = tf.where(tf.equal(tf.gather_nd(rows, places), 0))
    again = by_keras(tf.gather(rows, unsure[:, 0]), axis=1, keepdims=False)
    return tf.reshape(tf.tensor_scatter_nd_update(found, unsure, again), tf.shape(scores)[:-1])
