"""Sums are distinguished from other updates of a variable."""

import inspect

import keras
import pytest
import tensorflow as tf
from keras import ops

from tfdist_cli.train.model.trace.additivity import adds_up, retained

SUMS = {
    "nothing": lambda old, other, x: old,
    "an addition": lambda old, other, x: old + x,
    "from the other side": lambda old, other, x: x + old,
    "a subtraction": lambda old, other, x: old - x,
    "two additions": lambda old, other, x: (old + x) + tf.square(x),
    "several at once": lambda old, other, x: tf.add_n([x, old, x]),
    "in another type": lambda old, other, x: tf.cast(tf.cast(old, tf.float16) + tf.cast(x, tf.float16), tf.float32),
    "in another shape": lambda old, other, x: tf.reshape(tf.reshape(old, [3, 1]) + x[:, None], [3]),
    "at places": lambda old, other, x: tf.tensor_scatter_nd_add(old, [[0], [2]], x[:2]),
    "where something holds": lambda old, other, x: ops.where(x > 0, old + x, old),
}
OTHERS = {
    "a maximum": lambda old, other, x: tf.maximum(old, x),
    "a moving average": lambda old, other, x: 0.9 * old + 0.1 * x,
    "the last one": lambda old, other, x: x,
    "a constant": lambda old, other, x: tf.zeros_like(x),
    "the other way round": lambda old, other, x: x - old,
    "twice": lambda old, other, x: old + old,
    "what another has counted": lambda old, other, x: old + other,
    "what follows from another": lambda old, other, x: old + tf.square(x) * tf.sqrt(other),
    "instead of another": lambda old, other, x: other + x,
    "where it is large": lambda old, other, x: tf.where(old < 3, old + x, old),
    "up to a point": lambda old, other, x: tf.minimum(old + x, 3),
    "where something holds, else none": lambda old, other, x: tf.where(x > 0, old + x, 0),
    "a truth": lambda old, other, x: tf.cast(tf.cast(old, tf.bool), tf.float32) + x,
    "at places, in place": lambda old, other, x: tf.tensor_scatter_nd_update(old, [[0]], x[:1]),
    "by a function that is a graph of its own": lambda old, other, x: tf.function(lambda: tf.maximum(old, x))(),
    "a place that was counted": lambda old, other, x: tf.tensor_scatter_nd_add(
        old, tf.cast(other[:1, None], tf.int32), x[:1]
    ),
}


def results(count):
    with tf.Graph().as_default():
        old, other, x = (tf.compat.v1.placeholder(tf.float32, (3,)) for _ in range(3))
        return adds_up([old, other], [count(old, other, x), other])


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    assert results(SUMS[name]) == [True, True]


@pytest.mark.parametrize("name", OTHERS)
def test_other_updates(name):
    assert results(OTHERS[name]) == [False, True]


def test_a_tensor_outside_of_the_graph():
    now = tf.ones([3])
    assert results(lambda old, other, x: now) == [False, True]


NEEDED = {
    "MeanIoU": {"num_classes": 3},
    "IoU": {"num_classes": 3, "target_class_ids": [1]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [1]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
} | {
    name: {option: 0.5}
    for name, option in {
        "PrecisionAtRecall": "recall",
        "RecallAtPrecision": "precision",
        "SensitivityAtSpecificity": "specificity",
        "SpecificityAtSensitivity": "sensitivity",
    }.items()
}
METRICS = [
    name
    for name, kind in vars(keras.metrics).items()
    if inspect.isclass(kind) and issubclass(kind, keras.metrics.Metric) and name != "Metric"
]


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_keras(name):
    kind = getattr(keras.metrics, name)
    metric = kind(**NEEDED.get(name, {}))
    y = tf.zeros((4,), tf.int32) if name.startswith("Sparse") else tf.eye(4, 3)
    given = [tf.ones((4,))] if name in ("Sum", "Mean") else [y, tf.nn.softmax(tf.eye(4, 3))]
    metric.update_state(*given)  # makes its variables
    with tf.Graph().as_default():
        before = [tf.compat.v1.placeholder(variable.dtype, variable.shape) for variable in metric.variables]
        fed = [tf.compat.v1.placeholder(part.dtype, part.shape) for part in given]
        with keras.StatelessScope(list(zip(metric.variables, before, strict=True))) as scope:
            metric.update_state(*fed)
        after = [scope.get_current_value(variable) for variable in metric.variables]
        assert before
        assert all(adds_up(before, after))


RETAINED = {
    "a moving average": (lambda old, other, x: 0.9 * old + 0.1 * x, 0.9),
    "a moving average by its change": (lambda old, other, x: old - 0.25 * (old - x), 0.75),
    "a moving average of what another follows from": (lambda old, other, x: old * 0.5 + tf.square(other) * x, 0.5),
    "in another type": (lambda old, other, x: tf.cast(tf.cast(old, tf.float64) * 0.5, tf.float32) + x, 0.5),
    "a part": (lambda old, other, x: old / 4 + x, 0.25),
    "the same in both cases": (lambda old, other, x: tf.where(x > 0, 0.5 * old + x, old * 0.5), 0.5),
    "what another has counted": (lambda old, other, x: old + other, 1.0),
    "the last one": (lambda old, other, x: x, 0.0),
    "instead of another": (lambda old, other, x: other + x, 0.0),
    "nothing of it": (lambda old, other, x: 0.0 * old + x, 0.0),
}
UNKNOWN = {
    "in one case": lambda old, other, x: tf.where(x > 0, 0.9 * old + x, old),
    "more where it is large": lambda old, other, x: tf.where(old > 0, 0.9 * old, 0.9 * old + x),
    "by the batch": lambda old, other, x: old * x,
    "by each element": lambda old, other, x: old * [0.9, 0.8, 0.7] + x,
    "a maximum": lambda old, other, x: tf.maximum(old, x),
    "an inverse": lambda old, other, x: 1.0 / old,
    "by zero": lambda old, other, x: old / 0.0,
    "a square": lambda old, other, x: old * old,
    "twice": lambda old, other, x: old + old,
    "the other way round": lambda old, other, x: x - old,
    "a truth": lambda old, other, x: tf.cast(tf.cast(old, tf.bool), tf.float32) + x,
}


def parts_retained(count):
    with tf.Graph().as_default():
        old, other, x = (tf.compat.v1.placeholder(tf.float32, (3,)) for _ in range(3))
        return retained([old, other], [count(old, other, x), other])


@pytest.mark.parametrize("name", RETAINED)
def test_the_part_that_is_retained(name):
    count, expected = RETAINED[name]
    assert parts_retained(count) == [pytest.approx(expected), 1.0]


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_retains_all(name):
    assert parts_retained(SUMS[name]) == [1.0, 1.0]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_part_that_is_no_constant_counts_as_none(name):
    assert parts_retained(UNKNOWN[name]) == [0.0, 1.0]
