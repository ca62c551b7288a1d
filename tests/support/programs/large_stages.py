"""Trains a model of 1.2 GB with its layers on 4 workers, and prints how much memory the chief has needed for it.

large_stages.py CHECKPOINTS EPOCHS

A second call resumes from the checkpoint.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist

WIDTH, LAYERS, STEPS, BATCH = 3072, 11, 2, 8


def peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main():
    folder, epochs = sys.argv[1], int(sys.argv[2])
    before = peak()
    with tfdist.scope():
        model = keras.Sequential([*(keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)), keras.layers.Dense(10)])
        model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, WIDTH)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(len(x)) % 10)).batch(BATCH, drop_remainder=True)
    tfdist.fit(
        model,
        lambda _: data,
        epochs=epochs,
        micro_batches=2,
        checkpoints=tfdist.Checkpoints(folder, asynchronous=False),
    )
    size = sum(4 * int(np.prod(each.shape)) for each in [*model.variables, *model.optimizer.variables])
    print(json.dumps({"model": size, "grown": peak() - before}))


main()
