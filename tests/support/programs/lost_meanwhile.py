"""Trains until its first checkpoint is written, which it is when OUT/go, a pipe, has been written to.

lost_meanwhile.py OUT

OUT/reading is made when it is about to be, and OUT/back when steps are done after OUT/killed has been made.
Prints the checkpoint's step, and whether it holds what there was.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.train.checkpoint import writer
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.tensors import Snapshot, saved_variables

out = Path(sys.argv[1])


class LocalCopy(Snapshot):
    """A snapshot that is read late; of the first one there is another copy."""

    copies: list[np.ndarray] = []  # noqa: RUF012 there is one training

    def __init__(self, step, _changed):
        super().__init__(step)
        if not LocalCopy.copies:
            LocalCopy.copies += [variable.numpy() for variable in saved_variables(step)]

    def read(self, piece):
        if not (out / "reading").exists():
            (out / "reading").touch()
            (out / "go").read_text()
        return super().read(piece)


class Until(keras.callbacks.Callback):
    """Ends the training when there is a checkpoint; says when steps are done again."""

    def __init__(self):
        super().__init__()
        self.since = 0

    def on_train_batch_end(self, batch, logs=None):
        self.since += (out / "killed").exists()
        if self.since == 5:
            (out / "back").touch()
        if CheckpointFolder(out / "kept").steps():
            self.model.stop_training = True


def data(shard):
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(2, 80, 4)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat().skip(shard.step)


with tfdist.scope(shard=tfdist.ShardRule(min_bytes=1000)):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(100), keras.layers.Dense(4)])
    model.compile("adam", "mse")
kept = tfdist.Checkpoints(out / "kept", every_steps=20, keep=10**6)
with mock.patch.object(writer, "Snapshot", LocalCopy):
    rule = tfdist.Updates(mode="sync")  # an update takes a gradient of each worker
    given = {"callbacks": [Until()], "checkpoints": kept, "updates": rule, "share": "copy"}
    tfdist.fit(model, data, steps_per_epoch=10**6, **given)
first = CheckpointFolder(out / "kept").find(20)
reader = tf.train.load_checkpoint(str(first.path / "variables"))
saved = [
    reader.get_tensor(f"{group}/{number}/.ATTRIBUTES/VARIABLE_VALUE")
    for group, variables in (("parameters", model.trainable_variables), ("optimizer", model.optimizer.variables))
    for number in range(len(variables))
]
print(json.dumps([first.state.step, all(map(np.array_equal, saved, LocalCopy.copies))]))
