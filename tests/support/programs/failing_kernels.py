"""Trains by one rule after another, each time with a kernel that fails, and compares with updates by Keras.

failing_kernels.py CASE...

Prints for each case the log lines on optimizations, and the largest difference of a weight.
"""

import json
import logging
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine import fallback
from tfdist_cli.train.optimizers.registry import KERNELS, Kernel

STEPS, BATCH = 24, 8
numbers = np.random.default_rng(0)
X, Y = numbers.normal(size=(2, 192, 4)).astype(np.float32)
RULES = {
    "async": tfdist.Updates(),
    "push_every": tfdist.Updates(push_every=3),
    "sync": tfdist.Updates(mode="sync"),
    "quorum": tfdist.Updates(mode="bounded", staleness=1),
}


def while_tracing(update):
    raise ValueError("this kernel cannot be traced")


def while_running(update):
    """Changes the variable before it fails."""
    changed = update.variable.assign_add(tf.ones_like(update.variable), read_value=False)
    with tf.control_dependencies([changed]):
        return tf.debugging.Assert(tf.reduce_any(update.gradient > 1e9), ["this kernel cannot be run"])


class Log(logging.Handler):
    """Keeps the messages."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def trained(rule):
    """The weights after a training with the updates of a rule."""
    keras.utils.clear_session()
    with tfdist.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.01), "mse")

    def data(shard):
        # Every batch is the same, so that the order in which workers take them does not matter.
        return tf.data.Dataset.from_tensor_slices((X[:BATCH], Y[:BATCH])).batch(BATCH).repeat()

    tfdist.fit(model, data, steps_per_epoch=STEPS, epochs=1, updates=RULES[rule], share="copy")
    return [variable.numpy() for variable in model.variables], int(model.optimizer.iterations.numpy())


log = Log()
logging.getLogger("tfdist").setLevel(logging.INFO)
logging.getLogger("tfdist").addHandler(log)
fallback.is_of_model = lambda error: isinstance(error, TrainingError)
right = KERNELS[keras.optimizers.SGD]
out = {}
for case in sys.argv[1:]:
    rule, fails = case.split("/")
    KERNELS[keras.optimizers.SGD] = right
    wanted, iterations = trained(rule)
    log.lines.clear()
    kernel = {"tracing": while_tracing, "running": while_running}[fails]
    KERNELS[keras.optimizers.SGD] = Kernel(kernel, right.slots)
    weights, counted = trained(rule)
    out[case] = {
        "logged": [line for line in log.lines if "optimizations are off" in line],
        "iterations": [counted, iterations],
        "difference": max(float(np.abs(a - b).max()) for a, b in zip(weights, wanted, strict=True)),
    }
print(json.dumps(out))
