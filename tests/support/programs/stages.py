"""Trains a model for 50 steps, by Keras in one process, or on its cluster with some numbers of stages.

stages.py OUT MODEL STAGES...

Weights, slots and losses are written to OUT.npz, below the number of stages, or `plain`.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist_cli as tfdist

STEPS, BATCH, WORKERS = 50, 16, 4
random = np.random.default_rng(0)
X = random.normal(size=(STEPS * BATCH, 8, 8, 1)).astype(np.float32)
IDS = random.integers(0, 30, (STEPS * BATCH, 12)).astype(np.int32)
IDS[np.arange(12) >= 12 - random.integers(0, 6, len(IDS))[:, None]] = 0
Y = random.integers(0, 4, STEPS * BATCH)


def mlp():
    """One that has its layers in a model of its own, and one of them twice."""
    inputs = keras.Input((8, 8, 1))
    hidden = keras.Sequential([keras.Input((64,)), layers.Dense(32, "relu"), layers.Dense(32, "tanh")])
    shared = layers.Dense(32, "gelu")
    x = hidden(layers.Flatten()(inputs))
    x = layers.Dropout(0.0)(shared(x) + shared(layers.Dense(32)(x)))
    return keras.Model(inputs, layers.Dense(4)(x)), X


def cnn():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    shortcut = layers.MaxPooling2D()(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(x) + shortcut
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x))), X


def transformer():
    """Two blocks; the mask of the first layer is used by all of them."""
    ids = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(ids)
    x = x + layers.Embedding(12, 16)(ops.arange(12))
    for _ in range(2):
        seen = layers.MultiHeadAttention(2, 8)(x, x)
        x = layers.LayerNormalization()(x + seen)
        x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, "gelu")(x)))
    return keras.Model(ids, layers.Dense(4)(layers.GlobalAveragePooling1D()(x))), IDS


def compiled(build):
    keras.utils.set_random_seed(5)
    model, x = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model, x


def batches(x, size):
    """All but 5 examples: the last batch is smaller."""
    return tf.data.Dataset.from_tensor_slices((x, Y)).skip(5).batch(size)


def main():
    out, name, *counts = sys.argv[1:]
    build, written = globals()[name], {}

    def write(key, model, history):
        for number, variable in enumerate([*model.variables, *model.optimizer.variables]):
            written[f"{key}/{number:02}"] = np.asarray(variable)
        for metric, values in history.history.items():
            written[f"{key}/history/{metric}"] = np.array(values)

    if "TF_CONFIG" not in os.environ:
        model, x = compiled(build)
        write("plain", model, model.fit(batches(x, BATCH), shuffle=False, verbose=0))
    for stages in map(int, counts):
        with tfdist.scope(stages=stages):
            model, x = compiled(build)
        replicas = WORKERS // stages
        write(stages, model, tfdist.fit(model, lambda _: batches(x, BATCH // replicas), micro_batches=2))  # noqa: B023
    np.savez(f"{out}.npz", **written)


main()
