"""Trains the same twice: with checkpoints written at once, into OUT/False, and while training goes on, into OUT/True.

snapshots.py OUT

Prints how many steps were done while each of the latter was still to be written.
"""

import json
import sys
import threading
import weakref
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.train.checkpoint.tensors import Snapshot

out = Path(sys.argv[1])
STEPS, EVERY, LATER = 24, 6, 3


class Meanwhile(keras.callbacks.Callback):
    """Counts steps."""

    def __init__(self):
        super().__init__()
        self.done, self.more = 0, threading.Condition()

    def on_train_batch_end(self, batch, logs=None):
        with self.more:
            self.done += 1
            self.more.notify_all()


def held_back(meanwhile, waited):
    """`Snapshot.read` that waits for some steps more, and notes how many they were."""
    read, begun = Snapshot.read, weakref.WeakSet()

    def reading(snapshot, piece):
        if snapshot not in begun:
            begun.add(snapshot)
            at = EVERY * (len(waited) + 1)
            with meanwhile.more:
                assert meanwhile.more.wait_for(lambda: meanwhile.done >= min(at + LATER, STEPS), 120)
            waited.append(meanwhile.done - at)
        return read(snapshot, piece)

    return reading


def data(shard):
    numbers = np.random.default_rng(0)
    x, y = numbers.integers(0, 1001, (80, 4), np.int32), numbers.normal(size=(80, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat().skip(shard.step)


def train(asynchronous):
    keras.utils.set_random_seed(3)
    with tfdist.scope(shard=tfdist.ShardRule(min_bytes=1000)):
        table = keras.layers.Embedding(1001, 6)
        layers = [keras.Input((4,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(50, "relu")]
        model = keras.Sequential([*layers, keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        model.compile("adam", "mse")
    meanwhile, waited = Meanwhile(), []
    with mock.patch.object(Snapshot, "read", held_back(meanwhile, waited)):
        tfdist.fit(
            model,
            data,
            steps_per_epoch=STEPS,
            callbacks=[meanwhile],
            embeddings=tfdist.EmbeddingRule(min_bytes=1000),
            checkpoints=tfdist.Checkpoints(
                out / str(asynchronous), every_steps=EVERY, keep=9, asynchronous=asynchronous
            ),
        )
    return waited


assert train(False) == []
print(json.dumps(train(True)))
