"""Trains small models on the cluster that it is in, or by Keras's own `fit` where there is none, and prints results.

as_keras.py UPDATES CASE...

Alone, each batch is two workers' batches together. UPDATES is the mode of updates on parameter servers; without a CASE
all of them are trained.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist_cli as tfdist

IN_CLUSTER = "TF_CONFIG" in os.environ
MODE = sys.argv[1]
BATCH, STEPS = 4, 6
WORKERS = 2
random = np.random.default_rng(0)
X = random.normal(size=(WORKERS * BATCH * STEPS, 3)).astype(np.float32)
Y = (X.sum(axis=1, keepdims=True) + 0.1 * random.normal(size=(len(X), 1))).astype(np.float32)
WEIGHTS = np.repeat(random.uniform(0.5, 2, len(X) // WORKERS), WORKERS).astype(np.float32)
"""Of each worker the same, so that their means weigh alike."""


def data(*arrays):
    """Batches of a worker, of which those of all workers together are Keras's."""

    def batches(shard):
        examples = tf.data.Dataset.from_tensor_slices(arrays).shard(shard.count, shard.index)
        return examples.batch(BATCH if IN_CLUSTER else WORKERS * BATCH).repeat().skip(shard.step)

    return batches if IN_CLUSTER else batches(tfdist.Shard())


def fit(model, *arrays, **given):
    given = {"epochs": 2, "steps_per_epoch": STEPS // 2} | given
    if not IN_CLUSTER:
        return model.fit(data(*arrays), verbose=0, **given)
    return tfdist.fit(model, data(*arrays), updates=tfdist.Updates(mode=MODE), **given)


def found(model, history):
    """What a training came to."""
    weights = [variable.numpy().tolist() for variable in model.variables if "seed" not in variable.path]
    return {"weights": weights, **history.history}


def compiled(model, loss="mse", rate=0.05, **given):
    model.compile(keras.optimizers.SGD(rate), loss, **given)
    return model


def linear(**given):
    return keras.Sequential([keras.Input((3,)), layers.Dense(1, **given)])


# Losses: which are means, which are sums, and what of them Keras has scaled.


def reduced(reduction, *arrays, rate=0.05):
    with tfdist.scope():
        model = compiled(linear(), keras.losses.MeanSquaredError(reduction=reduction), rate)
    return found(model, fit(model, *(arrays or (X, Y))))


class OwnLoss(keras.Model):
    """The code of Keras's own docstring."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = ops.mean((y_pred - y) ** 2)
        loss += ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self):
        self.loss_tracker.reset_state()

    @property
    def metrics(self):
        return [self.loss_tracker]


def own_loss():
    with tfdist.scope():
        x = keras.Input((3,))
        model = compiled(OwnLoss(x, layers.Dense(1, kernel_regularizer="l2")(x)))
    return found(model, fit(model, X, Y))


class Endpoint(layers.Layer):
    """Keras's example of a layer that has the loss of its model."""

    def __init__(self):
        super().__init__()
        self.loss_fn = keras.losses.MeanSquaredError()
        self.dense = layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.1))

    def call(self, inputs):
        x, y = inputs
        y_pred = self.dense(x)
        self.add_loss(self.loss_fn(y, y_pred))
        self.add_loss(0.1 * ops.mean(ops.abs(y_pred)))
        return y_pred


def endpoint():
    with tfdist.scope():
        x, y = keras.Input((3,)), keras.Input((1,))
        model = keras.Model({"x": x, "y": y}, Endpoint()([x, y]))
        model.compile(keras.optimizers.SGD(0.05))
    return found(model, fit(model, {"x": X, "y": Y}))


def several_outputs():
    with tfdist.scope():
        x = keras.Input((3,))
        hidden = layers.Dense(2, kernel_regularizer="l2")(x)
        model = keras.Model(x, {"mean": layers.Dense(1, name="mean")(hidden), "sum": layers.Dense(1, name="sum")(x)})
        losses = {"mean": "mse", "sum": keras.losses.MeanSquaredError(reduction="sum")}
        model.compile(
            keras.optimizers.SGD(0.01), losses, loss_weights={"mean": 2.0, "sum": 0.3}, metrics=["mae", "mae"]
        )
    return found(model, fit(model, X, {"mean": Y, "sum": 2 * Y}))


def distilled():
    with tfdist.scope():
        model = keras.distillation.Distiller(
            teacher=linear(kernel_initializer="ones"), student=linear(),
            distillation_losses=keras.distillation.LogitsDistillation(temperature=2.0), student_loss_weight=0.6,
        )  # fmt: skip
        compiled(model)
    return found(model, fit(model, X, Y))


def float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with tfdist.scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(1), layers.Activation("linear", dtype="float32")])
            scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
            model.compile(scaled, keras.losses.MeanSquaredError(reduction="sum"))
        return found(model, fit(model, X, Y))
    finally:
        keras.config.set_dtype_policy("float32")


CASES = {
    "a mean": lambda: reduced("sum_over_batch_size"),
    "a mean with weights": lambda: reduced("mean_with_sample_weight", X, Y, WEIGHTS),
    "a weighted sum": lambda: reduced("sum", X, Y, WEIGHTS, rate=0.01),
    "a sum": lambda: reduced("sum", rate=0.01),
    "no reduction": lambda: reduced("none", rate=0.01),
    "a compute_loss of its own": own_loss,
    "losses of layers": endpoint,
    "several outputs": several_outputs,
    "distillation": distilled,
    "float16": float16,
}

written = {}
for name in sys.argv[2:] or CASES:
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    written[name] = CASES[name]()
print(json.dumps(written))
