"""The cross-entropy of class numbers: −log softmax(z)ₖ for the scores z of an example and its class k.

TensorFlow's kernel passes over all scores several times with code for single numbers: it compares each class with the
label, once for the loss and once for the gradient. Here, elementwise operations compute the exponentials, the loss is
a lookup in a row, and the gradient is the softmax with 1 subtracted in one place of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def of_classes(labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Returns the loss of each example, with TensorFlow's formula: its values and gradients up to rounding.

    Args:
        labels: integers of shape (…).
        scores: (…, classes); the number of classes is known.

    Returns:
        (…), of the scores' type. It fails with `InvalidArgumentError` if a label is not a class.
    """
    classes = int(scores.shape[-1])
    flat = tf.cast(tf.reshape(labels, [-1]), tf.int32)
    with tf.control_dependencies([_are_classes(flat, classes)]):
        flat = tf.identity(flat)
    return tf.reshape(_losses(tf.reshape(scores, [-1, classes]), flat), tf.shape(labels))


def _are_classes(labels: tf.Tensor, classes: int) -> Any:
    least, most = tf.reduce_min(labels), tf.reduce_max(labels)
    wrong = tf.strings.as_string(tf.where(least < 0, least, most))
    message = ["Received a label value of ", wrong, f" which is outside the valid range of [0, {classes})"]
    return tf.raw_ops.Assert(condition=(least >= 0) & (most < classes), data=[tf.strings.join(message)])


@tf.custom_gradient
def _losses(scores: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
    """The losses of (n, classes) scores and n labels."""
    shifted = scores - tf.stop_gradient(tf.reduce_max(scores, axis=1, keepdims=True))
    exponentials = tf.exp(shifted)
    total = tf.reduce_sum(exponentials, axis=1, keepdims=True)
    places = tf.stack([tf.range(tf.shape(labels)[0]), labels], axis=1)
    losses = tf.math.log(total[:, 0]) - tf.gather_nd(shifted, places)

    def gradient(weights: tf.Tensor) -> tuple[tf.Tensor, None]:
        softmax = exponentials * (weights[:, None] / total)
        return tf.tensor_scatter_nd_sub(softmax, places, weights), None

    return losses, gradient
