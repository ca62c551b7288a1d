"""Saves checkpoints over and over in processes that are killed at random moments, and looks at what the next one finds.

saves.py FOLDER TRIALS SEED

Every process is forked from this one, which has imported TensorFlow once and started none of it. All that a checkpoint
holds is one number, the same everywhere in it, and each has a larger one than the last. Prints as JSON in how many
trials something unfinished was left, by its kind, and in how many a checkpoint with so many deltas was found. Fails
when a process finds something damaged, mixed or too old.
"""

import collections
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.checkpoint import tensors
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.tensors import saved_variables
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.layers.dynamic_embedding import DynamicEmbedding
from tfdist_cli.train.layers.dynamic_tables import track_changes
from tfdist_cli.train.model.train_step import ModelStep

tensors.FILE_BYTES = 50_000  # so that there are several
MOST = 3
"""Checkpoints that a process has saved, at the most, when its end is near."""
LONGEST = 0.1
"""Seconds that are left to it then; it takes some hundredths to save."""
UNFINISHED = (".writing-", ".replaced-", ".removing-")


def built():
    table = DynamicEmbedding(4, capacity=100)
    layers = [keras.Input((20,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(200)]
    model = keras.Sequential([*layers, keras.layers.Dense(50)])
    model.compile("adam", "mse")
    track_changes(model)
    step = ModelStep(model)
    step.build((tf.TensorSpec((32, 20), tf.int64), tf.TensorSpec((32, 50))))
    return step


class Telling(CheckpointFolder):
    """Tells what it has saved."""

    def __init__(self, path, say):
        super().__init__(path, keep=2)
        self.say = say

    def save(self, step, state, **given):
        path = super().save(step, state, **given)
        self.say("saved", state.epoch)
        return path


def save_on(folder, numbers, say):
    """What a process does: it goes on from what it finds, until it is killed, or its parent is gone."""
    parent = os.getppid()
    step = built()
    kept = Telling(folder, say)
    kept.prepare()
    left = [entry.name for entry in folder.iterdir() if not entry.name.startswith("step-")]
    if left:
        raise AssertionError(f"{left} have not been cleared away")
    found, damaged = kept.newest()
    if damaged:
        raise AssertionError(f"damaged: {damaged}")
    value = number = 0
    if found:
        kept.restore(found, step)
        number, value = found.state.step, found.state.epoch
        held = {*np.concatenate([variable.numpy().ravel() for variable in saved_variables(step)]), *found.arrays()[0]}
        say("deltas", found.state.deltas)
        if held != {value}:
            raise AssertionError(f"{found.path} holds {held} instead of {value}")
    say("resumed", value)
    saving = CheckpointWriter(kept, step, asynchronous=True, full_every=3)
    while os.getppid() == parent:
        value += 1
        number += numbers.random() < 0.7  # otherwise one takes the place of another
        for variable in saved_variables(step):
            variable.assign(np.full(variable.shape, value, variable.dtype))
        content = CheckpointContent(TrainingState(number, value), [np.full(1000, value)])
        saving.save(content, wait=numbers.random() < 0.5)
        if saving.unsaved:
            raise saving.unsaved


def forked(folder, seed):
    """A process that saves, and where it tells of it."""
    told, tells = os.pipe()
    child = os.fork()
    if child:
        os.close(tells)
        return child, told
    try:
        save_on(folder, random.Random(seed), lambda kind, value: os.write(tells, f"{kind} {value}\n".encode()))
    except BaseException:  # noqa: BLE001 it is told, and the process ends
        traceback.print_exc()
    finally:
        os._exit(1)


def trial(folder, seed, least):
    """Lets a process save until it is killed.

    Returns:
        What it has saved last, as far as it has said so.
    """
    numbers = random.Random(seed)
    child, told = forked(folder, seed)
    with os.fdopen(told) as said:
        lines = [said.readline() for _ in range(1 + numbers.randrange(MOST + 1))]
        time.sleep(numbers.uniform(0, LONGEST))  # the moment is what is tried
        os.kill(child, signal.SIGKILL)
        lines += said
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit(f"seed {seed}: a process has ended by itself")
    told = [line.split() for line in lines]
    deltas[max(int(value) for kind, value in [("", 0), *told] if kind in ("", "deltas"))] += 1
    values = [int(value) for kind, value in told if kind != "deltas"]
    if values[0] < least:
        raise SystemExit(f"seed {seed}: {least} had been saved, but {values[0]} was found")
    return values[-1]


folder, trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
unfinished, deltas = collections.Counter(), collections.Counter()
last = 0
for number in range(trials):
    last = trial(folder, seed + number, last)
    names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    unfinished.update({prefix: any(name.startswith(prefix) for name in names) for prefix in UNFINISHED})
print(json.dumps({"saved": last, "unfinished": unfinished, "deltas": deltas}))
