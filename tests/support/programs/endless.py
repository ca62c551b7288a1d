"""Trains without an end, and says so once.

endless.py [UNITS]

UNITS: of a hidden layer.
"""

import sys

import keras
import tensorflow as tf

import tfdist_cli as tfdist

with tfdist.scope():
    hidden = map(keras.layers.Dense, map(int, sys.argv[1:]))
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(3)])
    model.compile("sgd", "mse")
says = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: print("trains" if epoch == 1 else "", flush=True)
)
batch = tf.ones([8, 6]), tf.zeros([8, 3])
data = tf.data.Dataset.from_tensors(batch).repeat()
tfdist.fit(model, lambda shard: data, epochs=1_000_000, steps_per_epoch=50, share="copy", callbacks=[says])
