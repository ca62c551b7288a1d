"""The argmax of many classes is Keras's, with signed zeros, ties and NaN."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfdist_cli.train.model.many_classes import argmax

CLASSES = 300
ROWS = {
    "random": np.random.default_rng(0).normal(size=CLASSES),
    "negative": -1 - np.arange(CLASSES, dtype=float),
    "zeros": np.zeros(CLASSES),
    "negative_zeros": -np.zeros(CLASSES),
    "zero_after_negative_zeros": np.r_[-np.zeros(CLASSES - 1), 0.0],
    "zero_between": np.r_[-1.0, -0.0, 0.0, -0.0, 0.0, -np.ones(CLASSES - 5)],
    "tiny": np.r_[-0.0, 0.0, 1e-37, -np.ones(CLASSES - 3)],
    "equal": np.ones(CLASSES),
    "infinite": np.r_[-np.inf, np.inf, np.inf, np.zeros(CLASSES - 3)],
    "nan": np.r_[1.0, np.nan, 2.0, np.zeros(CLASSES - 3)],
    "only_nan": np.full(CLASSES, np.nan),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", ROWS)
def test_as_keras(row, dtype):
    scores = tf.constant([ROWS["random"], ROWS[row]], dtype)
    np.testing.assert_array_equal(argmax.of_rows(scores, ops.argmax), ops.argmax(scores, axis=-1))


def test_any_rank_and_a_batch_of_unknown_size():
    scores = tf.constant(list(ROWS.values())[:6], tf.float32)
    signature = [tf.TensorSpec([None, 2, CLASSES])]
    traced = tf.function(lambda x: argmax.of_rows(x, ops.argmax), input_signature=signature)
    found = traced(tf.reshape(scores, [3, 2, CLASSES]))
    np.testing.assert_array_equal(tf.reshape(found, [-1]), ops.argmax(scores, axis=-1))
    assert found.dtype == tf.int32
