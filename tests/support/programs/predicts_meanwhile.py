"""Predicts on parameter servers, and waits within it until OUT/go, a pipe, has been written to. Then it trains and
predicts again.

predicts_meanwhile.py OUT

OUT/waiting is made before that. Prints the number of predictions, how far they are from Keras's, and the number of
updates.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.train.engine.parameter_server.context import Stream

out = Path(sys.argv[1])
take, taken = Stream.take, []


def watched(stream):
    """Takes a group; waits before the fourth."""
    taken.append(stream)
    if len(taken) == 4:
        (out / "waiting").touch()
        (out / "go").read_text()
    return take(stream)


with tfdist.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
X = np.random.default_rng(0).normal(size=(997, 3)).astype(np.float32)
data = tf.data.Dataset.from_tensor_slices(X).batch(5)
with mock.patch.object(Stream, "take", watched):
    predicted = tfdist.predict(model, data)
difference = float(np.abs(predicted - model.predict(X, verbose=0)).max())
tfdist.fit(model, X[:96], X[:96, 0], steps_per_execution=1)
again = tfdist.predict(model, data)
difference = max(difference, float(np.abs(again - model.predict(X, verbose=0)).max()))
print(json.dumps([len(predicted), difference, int(model.optimizer.iterations)]))
