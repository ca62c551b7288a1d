"""A training whose workers change: each task of a parameter server cluster, started by itself.

Arguments: a file, which ends the training at the end of an epoch once it exists; JSON of the update rule; and anything
if a callback should act on each batch.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.errors import TfdistError


class StopAtFile(keras.callbacks.Callback):
    """Ends the training when a file exists."""

    def __init__(self, path):
        super().__init__()
        self._path = Path(path)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self._path.exists()


class CountBatches(keras.callbacks.Callback):
    """Counts the batches of all epochs."""

    def __init__(self):
        super().__init__()
        self.begun = self.ended = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.begun += 1

    def on_train_batch_end(self, batch, logs=None):
        self.ended += 1


def main(file, updates, each_batch=""):
    keras.utils.set_random_seed(1)
    with tfdist.scope():
        hidden = [keras.layers.Dense(100, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input([32]), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    # Full batches only, for two, three and four workers.
    x, y = random.normal(size=[9600, 32]).astype("float32"), random.integers(0, 10, 9600)

    def data(shard):
        """Called for a worker that joins while the others run functions."""
        return tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index).batch(16)

    counter = CountBatches()
    tfdist.fit(
        model,
        data,
        epochs=2000,
        callbacks=[StopAtFile(file), *([counter] if each_batch else [])],
        updates=tfdist.Updates(**json.loads(updates)),
    )
    steps = int(model.optimizer.iterations.numpy())
    if steps and each_batch and not counter.begun == counter.ended == steps:
        raise SystemExit(f"{counter.begun} batches began and {counter.ended} ended in {steps} steps")
    print(steps)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TfdistError as error:
        print(error.code)
        raise
