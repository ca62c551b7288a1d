"""Trains two epochs of 20 steps, with checkpoints in OUT/kept.

terminated.py OUT WHERE [MODE]

WHERE is what never ends in the first epoch: `validation`, or what a callback calls: `tfdist.evaluate`,
`tfdist.predict`, `model.evaluate` or `model.predict`; `nothing` if it ends. OUT/begun is made before it. MODE is that
of the updates. Prints the updates, and the epochs whose end a callback was told of. Exits with the code of an error.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.errors import TfdistError

out, where, mode = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or ["async"])[0]
ENDLESS = 10**9
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def data(shard):
    own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(shard.count, shard.index)
    return own.repeat().batch(8).skip(shard.step)


class Callback(keras.callbacks.Callback):
    """Does what never ends."""

    ended: tuple[int, ...] = ()

    def on_test_begin(self, logs=None):
        if where == "validation":
            (out / "begun").touch()

    def on_epoch_end(self, epoch, logs=None):
        if "." in where:
            (out / "begun").touch()
            object_name, name = where.split(".")
            method = getattr(tfdist if object_name == "tfdist" else self.model, name)
            own = (self.model,) if object_name == "tfdist" else ()
            given = data if object_name == "tfdist" else data(tfdist.Shard())
            method(*own, given, steps=ENDLESS, verbose=0)
        self.ended = (*self.ended, epoch)


with tfdist.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
callback = Callback()
try:
    tfdist.fit(
        model,
        data,
        epochs=2,
        steps_per_epoch=20,
        validation_data=tfdist.Validation(data, steps=ENDLESS if where == "validation" else 3),
        callbacks=[callback],
        checkpoints=tfdist.Checkpoints(out / "kept", every_seconds=3600),
        updates=None if mode == "none" else tfdist.Updates(mode=mode),
    )
except TfdistError as error:
    print(error.message, file=sys.stderr)
    sys.exit(error.exit_code)
if tfdist.is_chief():
    print(json.dumps([int(np.asarray(model.optimizer.iterations)), list(callback.ended)]))
