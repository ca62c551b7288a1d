"""Trains a model with two tables by executions of two and of three steps; prints the tensors that cross in each.

The tensors are those of the graph of an execution: for each pair of tasks, how many of the one are used by the other.
"""

import json
from collections import Counter

import keras
import numpy as np
import tensorflow as tf
import unrolling  # type: ignore[import-not-found] # beside this file

import tfdist_cli as tfdist
from tfdist_cli.train.engine.parameter_server.asynchronous.executions import WorkerExecutions

ROWS = 1000
crossing = {}


def task(device):
    """The role and the number of the task of a device; operations without a device run on the worker."""
    found = tf.DeviceSpec.from_string(device)
    return f"{found.job}:{found.task}" if found.job else "worker"


def edges(graph):
    """Counts the tensors, and the operations that others wait for, of one task that another one uses."""
    captured = {inner.name: outer.device for outer, inner in graph.captures}

    def place(operation):
        """An operation on a variable runs where that is."""
        resources = [captured.get(each.name, "") for each in operation.inputs if each.dtype == tf.resource]
        return task(operation.device or next(filter(None, resources), ""))

    found = set()
    for operation in graph.get_operations():
        values = [(each.op, each.name) for each in operation.inputs if each.dtype != tf.resource]
        for other, name in [*values, *((each, each.name) for each in operation.control_inputs)]:
            if place(other) != place(operation):
                found.add((place(other), place(operation), name))
    return Counter(f"{begin} {end}" for begin, end, _ in found)


def recorded(packed):
    """Wraps `WorkerExecutions._packed`, the end of each trace."""

    def wrapper(self, begun, taken, *args):
        result = packed(self, begun, taken, *args)
        crossing[taken] = edges(tf.compat.v1.get_default_graph())
        return result

    return wrapper


def build():
    keras.utils.set_random_seed(3)
    user, item = (keras.Input((), dtype="int32", name=name) for name in ("user", "item"))
    rows = [keras.layers.Embedding(ROWS, 4)(each) for each in (user, item)]
    out = keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(rows)))
    model = keras.Model([user, item], out)
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)), "mse")
    return model


WorkerExecutions._packed = recorded(WorkerExecutions._packed)  # type: ignore[method-assign] # for this process
unrolling.at_once()
random = np.random.default_rng(0)
x = {name: random.integers(0, ROWS, 96).astype(np.int32) for name in ("user", "item")}
y = random.normal(size=(96, 1)).astype(np.float32)
for steps in (2, 3):
    with tfdist.scope():
        model = build()
    by_rows = tfdist.EmbeddingRule(min_bytes=1)
    tfdist.fit(model, x, y, batch_size=8, steps_per_epoch=6, steps_per_execution=steps, embeddings=by_rows, verbose=0)
print(json.dumps(crossing))
