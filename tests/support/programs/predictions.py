"""Predicts on its cluster, and prints the results as JSON."""

import json
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tfdist_cli.errors import TfdistError

X = np.random.default_rng(0).normal(size=(203, 3)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 3000, (203, 2))
SCOPE = partial(tfdist.scope, shard=tfdist.ShardRule(min_bytes=10_000))


def dense():
    with SCOPE():
        return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.5), layers.Dense(1)])


def several():
    with SCOPE():
        x, ids = keras.Input((3,)), keras.Input((2,), dtype="int32")
        table = layers.Flatten()(layers.Embedding(3000, 8)(ids))
        words = layers.StringLookup(vocabulary=["a", "b"], invert=True)(ids)
        outputs = {"sum": layers.Dense(2)(layers.Concatenate()([x, table])), "rows": table, "words": words}
        return keras.Model({"x": x, "ids": ids}, outputs)


def difference(ours, kerass):
    """The largest difference of two predictions of the same structure; of texts, how many differ."""
    tf.nest.assert_same_structure(ours, kerass)
    pairs = list(zip(tf.nest.flatten(ours), tf.nest.flatten(kerass), strict=True))
    assert all(one.shape == other.shape and one.dtype.kind == other.dtype.kind for one, other in pairs)
    kinds = {True: lambda one, other: int((one != other).sum()), False: lambda one, other: np.abs(one - other).max()}
    return max(float(kinds[one.dtype.kind == "O"](one, other)) for one, other in pairs)


def padded():
    """How far predictions of batches are from Keras's that are padded to different lengths."""
    with SCOPE():
        x = keras.Input((None, 3))
        model = keras.Model(x, layers.Dense(2)(x))
    rows = tf.ragged.range(tf.range(1, 70) % 9 + 1)
    batches = tf.data.Dataset.from_tensor_slices(rows).map(lambda row: tf.one_hot(row % 3, 3)).padded_batch(4)
    ours, kerass = tfdist.predict(model, batches), model.predict(batches, verbose=0)
    assert ours.row_splits.numpy().tolist() == kerass.row_splits.numpy().tolist()
    return difference(ours.flat_values.numpy(), kerass.flat_values.numpy())


class Nested(keras.callbacks.Callback):
    """Predicts at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        own = self.model.predict(X, verbose=0)
        try:
            self.found.append(difference(tfdist.predict(self.model, X), own))
        except TfdistError as error:
            self.found.append(error.code)


model, table = dense(), several()
given = {"x": X, "ids": IDS}
batches = tf.data.Dataset.from_tensor_slices((X, X)).batch(5)
error = None
try:
    tfdist.predict(model, batches.shuffle(3))
except TfdistError as caught:
    error = caught.code
found = {
    "arrays": difference(tfdist.predict(model, X, batch_size=3), model.predict(X, verbose=0)),
    "a dataset": difference(tfdist.predict(model, batches), model.predict(X, verbose=0)),
    "some batches": difference(tfdist.predict(model, batches, steps=9), model.predict(X[:45], verbose=0)),
    "few examples": difference(tfdist.predict(model, X[:1]), model.predict(X[:1], verbose=0)),
    "none": len(tfdist.predict(model, batches.take(0))),
    "several outputs": difference(tfdist.predict(table, given, batch_size=2), table.predict(given, verbose=0)),
    "padded": padded(),
    "shuffled": error,
}
with SCOPE():
    model.compile("sgd", "mse")
nested = Nested()
tfdist.fit(model, (X, X[:, :1]), callbacks=[nested])
found["nested"] = nested.found
found["after"] = difference(tfdist.predict(model, X), model.predict(X, verbose=0))
expected, chiefs = model.predict(X, verbose=0), model.get_weights()
if not tfdist.is_chief():
    model.set_weights([value + 1 for value in chiefs])
found["others' weights differ"] = difference(tfdist.predict(model, X), expected)
twice = dense()
with SCOPE():
    twice.compile("sgd", "mse", jit_compile=True)  # XLA reads no variables of other tasks
twice.set_weights([value * 2 for value in chiefs])
if tfdist.is_chief():
    model.set_weights([value * 2 for value in chiefs])
scores = [tfdist.evaluate(model, (X, X[:, :1]))["loss"], twice.evaluate(X, X[:, :1], verbose=0)]
found["the chief's weights differ"] = difference(*map(np.float32, scores))
print(json.dumps(found))
