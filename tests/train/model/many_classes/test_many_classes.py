"""Within a step, the loss and the accuracy of many classes are computed in fewer passes, with Keras's results."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.model.many_classes import LEAST_CLASSES, fewer_passes

KERNEL = "SparseSoftmaxCrossEntropyWithLogits"


def traced(classes, **loss):
    """A function of labels and scores that returns Keras's loss and accuracy, traced here."""

    @tf.function(autograph=False)
    def scored(labels, scores):
        return (
            keras.losses.SparseCategoricalCrossentropy(**loss)(labels, scores),
            keras.ops.mean(keras.metrics.sparse_categorical_accuracy(labels, scores)),
        )

    return scored.get_concrete_function(tf.TensorSpec([None, 5], tf.int64), tf.TensorSpec([None, 5, classes]))


def operations(function):
    """The types of a function's operations."""
    return {operation.type for operation in function.graph.get_operations()}


@pytest.mark.parametrize("loss", [{"from_logits": True}, {}, {"from_logits": True, "ignore_class": 3}], ids=str)
def test_results_are_keras_s(loss):
    random = np.random.default_rng(1)
    labels = tf.constant(random.integers(LEAST_CLASSES, size=(4, 5)))
    scores = tf.nn.softmax(tf.constant(random.normal(size=(4, 5, LEAST_CLASSES)), tf.float32))
    with fewer_passes():
        own = traced(LEAST_CLASSES, **loss)
    theirs = traced(LEAST_CLASSES, **loss)
    assert KERNEL not in operations(own)
    assert KERNEL in operations(theirs)
    np.testing.assert_allclose(own(labels, scores), theirs(labels, scores), rtol=1e-6)


@pytest.mark.parametrize("classes", [LEAST_CLASSES - 1, None], ids=["few", "unknown"])
def test_others_are_left_to_tensorflow(classes):
    with fewer_passes():
        assert KERNEL in operations(traced(classes, from_logits=True))


def test_half_precision_is_left_to_tensorflow():
    @tf.function(autograph=False)
    def loss(labels, scores):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)

    spec = tf.TensorSpec([2], tf.int64), tf.TensorSpec([2, LEAST_CLASSES], tf.bfloat16)
    with fewer_passes():
        assert KERNEL in operations(loss.get_concrete_function(*spec))


def test_arrays_are_left_to_keras():
    scores = np.zeros([2, LEAST_CLASSES], np.float32)
    with fewer_passes():
        assert keras.ops.argmax(scores, axis=-1).shape == (2,)
        assert keras.ops.argmax(tf.constant(scores), axis=-1, keepdims=True).shape == (2, 1)
        assert keras.ops.argmax(tf.constant(scores), axis=0).shape == (LEAST_CLASSES,)
        assert keras.ops.argmax(tf.constant(scores)).shape == ()
