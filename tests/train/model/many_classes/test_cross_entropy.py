"""The cross-entropy of many classes equals TensorFlow's, with its gradients."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.model.many_classes import cross_entropy

CLASSES = 300
SHAPE = (3, 4)


@pytest.fixture(params=["float32", "float64"])
def given(request):
    """Labels and scores, some of them far apart."""
    random = np.random.default_rng(0)
    scores = random.normal(scale=5, size=(*SHAPE, CLASSES))
    scores[0, 0, 7] = 1e4
    return tf.constant(random.integers(CLASSES, size=SHAPE)), tf.constant(scores, request.param)


def by_tensorflow(labels, scores):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)


def derivatives(loss, labels, scores):
    """The losses, the gradient of their weighted sum, and the gradient of a function of that gradient."""
    weights = tf.reshape(tf.cast(tf.range(12), scores.dtype), SHAPE)
    with tf.GradientTape() as outer:
        outer.watch(scores)
        with tf.GradientTape() as tape:
            tape.watch(scores)
            losses = loss(labels, scores)
            total = tf.reduce_sum(weights * losses)
        first = tape.gradient(total, scores)
        penalty = tf.reduce_sum(first**3)
    return losses, first, outer.gradient(penalty, scores)


def test_losses_and_gradients_are_tensorflows(given):
    bound = 1e-6 if given[1].dtype == tf.float32 else 1e-13
    for own, expected in zip(
        derivatives(cross_entropy.of_classes, *given), derivatives(by_tensorflow, *given), strict=True
    ):
        assert own.shape == expected.shape
        scale = np.abs(expected).max()
        np.testing.assert_allclose(own / scale, expected / scale, rtol=0, atol=bound)


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_fails(given, label):
    labels, scores = given
    wrong = tf.tensor_scatter_nd_update(labels, [[1, 2]], [label])
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"label value of {label} .* range of \[0, {CLASSES}\)"):
        tf.function(cross_entropy.of_classes)(wrong, scores)


def test_a_batch_of_unknown_size(given):
    labels, scores = given
    signature = [tf.TensorSpec([None, None], labels.dtype), tf.TensorSpec([None, None, CLASSES], scores.dtype)]
    traced = tf.function(cross_entropy.of_classes, input_signature=signature)
    np.testing.assert_allclose(traced(labels, scores), by_tensorflow(labels, scores), rtol=1e-5)
    assert traced(labels[:0], scores[:0]).shape == (0, 4)
