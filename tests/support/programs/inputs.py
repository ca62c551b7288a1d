"""Trains on data that only this process can read, and prints the weights and the history of each case.

inputs.py BATCH WORKERS [sync | async]

Alone, Keras's own `fit` trains on batches of BATCH; each of WORKERS takes its part of such a batch. Asynchronous
workers keep the weights as they are: the mean loss of all batches does not depend on their order then.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.python_data import Rows, generated

workers, rule = int(sys.argv[2]), sys.argv[3:]
batch, rate = int(sys.argv[1]) // workers, 0.0 if rule == ["async"] else 0.1
random = np.random.default_rng(0)
X = random.normal(size=(96, 4)).astype(np.float32)
Y = 0.1 * X[:, :2] ** 2
OTHER = X[:32] + 1, Y[:32]
in_cluster = "TF_CONFIG" in os.environ
updates = {"updates": tfdist.Updates(mode=rule[0])} if rule else {}


def fit(model, data, **given):
    if in_cluster:
        return tfdist.fit(model, data, **given, **updates)
    return model.fit(data, shuffle=False, verbose=0, **given)


def steps(count):
    return count * workers if rule == ["async"] else count


CASES = {
    "PyDataset": lambda: (Rows(X, Y, batch=batch, scale=0.9), {"epochs": 3, "shuffle": False}),
    "generator": lambda: (
        generated(X, Y, batch=batch),
        {"epochs": 2, "steps_per_epoch": steps(6), "validation_data": Rows(*OTHER, batch=batch)},
    ),
    "unknown length": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: x[0] < 9).batch(batch),
        {"epochs": 3},
    ),
    "a generator's end": lambda: (generated(X, Y, batch=batch, passes=1), {"epochs": 1}),
    "endless": lambda: (
        Rows(X, Y, batch=batch, endless=True),
        {"epochs": 2, "steps_per_epoch": steps(3), "shuffle": False},
    ),
}
if rule == ["async"]:
    del CASES["unknown length"]  # each worker reads its own shard, and one is ahead of the other when an epoch ends
results = {}
for name, case in CASES.items():
    keras.utils.set_random_seed(3)
    with tfdist.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(rate, 0.9), "mse")
    data, given = case()
    if not in_cluster:
        given.pop("shuffle", None)
    history = fit(model, data, **given).history
    results[name] = {"history": history, "weights": [weight.tolist() for weight in model.get_weights()]}
if tfdist.is_chief():
    print(json.dumps(results))
