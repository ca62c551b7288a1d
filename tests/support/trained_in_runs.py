"""Small models that engines train in several runs."""

import keras
import numpy as np
import tensorflow as tf

from tests.support.local_coordinator import NoPause


def examples():
    x = np.random.default_rng(0).random((96, 20), np.float32)
    return tf.data.Dataset.from_tensor_slices((x, np.arange(96) % 3))


def network(make_optimizer, units=200):
    """A model with state that a step assigns, and with weights that no step changes."""
    keras.utils.set_random_seed(1)
    frozen = keras.layers.Dense(20, trainable=False)
    hidden = [keras.layers.Dense(units, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((20,)), frozen, *hidden, keras.layers.Dense(3)])
    model.compile(make_optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def recurrent():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Reshape((4, 5)), keras.layers.LSTM(32), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def trained(engine, model, runs=((2, 2), (5, 2))):
    """Trains in several runs, with a variable that is assigned between two of them; returns what is known then."""
    first, losses = 0, []
    for steps, size in runs:
        for execution in engine.run(steps, first=first, size=size, adapts=False, pause=NoPause()):
            losses += execution.losses.tolist()
        first += steps
        model.layers[1].weights[0].assign(model.layers[1].weights[0] * 0.5)
    return losses, [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
