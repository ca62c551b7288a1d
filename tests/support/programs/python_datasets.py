"""Trains on a dataset that calls Python code and is older than the cluster; prints what was seen in each epoch.

python_datasets.py MODE [OUT]

In the second pass the dataset makes OUT/waiting, and continues when OUT/go, a pipe, has been written to.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist

out = Path(sys.argv[2]) if len(sys.argv) > 2 else None
ROWS = 96
passes = []
SEED = None if sys.argv[1] == "async" else 1  # all mirrored workers need the same order
if SEED:
    tf.config.experimental.enable_op_determinism()  # as programs do that are to be repeatable: TensorFlow wants a seed


def rows():
    passes.append(0)
    for number in range(ROWS):
        if out and len(passes) == 2 and number == ROWS // 2:
            (out / "waiting").touch()
            (out / "go").read_text()
        yield np.full([4], number, np.float32), [number]


def doubled(x, y):
    called = tf.numpy_function(lambda value: 2 * value, [x], tf.float32)
    return tf.ensure_shape(called, [None, 4]), y


signature = tf.TensorSpec([4], tf.float32), tf.TensorSpec([1], tf.float32)
data = tf.data.Dataset.from_generator(rows, output_signature=signature).shuffle(ROWS, SEED).batch(4).map(doubled)
scored = tf.data.Dataset.range(ROWS).map(
    lambda number: tf.py_function(lambda value: tf.cast(value, tf.float32)[None], [number], tf.float32)
)
scored = scored.map(lambda y: tf.ensure_shape(y, [1])).map(lambda y: (tf.tile(y, [4]), y)).shuffle(ROWS, SEED).batch(5)


class Seen(keras.metrics.Metric):
    """A sum over the examples that were seen."""

    def __init__(self, name, value):
        super().__init__(name=name)
        self.value = value
        self.total = self.add_weight(shape=(), initializer="zeros", dtype="int64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(self.value(keras.ops.cast(y_true, "int64"))))

    def result(self):
        return self.total


with tfdist.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    seen = [Seen("count", keras.ops.ones_like), Seen("sum", lambda y: y), Seen("squares", lambda y: y * y)]
    model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=seen)
data = data.prefetch(2)
updates = None if sys.argv[1] == "mirrored" else tfdist.Updates(mode=sys.argv[1])
history = tfdist.fit(model, data, epochs=3, validation_data=scored, updates=updates).history
history.pop("loss"), history.pop("val_loss")
print(json.dumps({name: [int(value) for value in values] for name, values in history.items()}))
