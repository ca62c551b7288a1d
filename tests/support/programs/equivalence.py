"""Trains one model by several recipes on its cluster, and writes the results.

equivalence.py OUT BATCH RECIPE...

A batch of all the data, 480, is the same for every worker: steps that follow each other then have the same result on
any worker, and asynchronous workers are made to take turns.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf
from gradient_layers import Dropping, Penalized, every  # type: ignore[import-not-found] # beside this file

import tfdist_cli as tfdist
from tfdist_cli.train.cluster import join
from tfdist_cli.train.engine.pacing import Pacing

out, batch, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
STEPS = 50
random = np.random.default_rng(0)
X = random.normal(size=(480, 6)).astype(np.float32)
Y = (X[:, :3] + random.normal(size=(480, 3))).argmax(axis=1)

optimizers, layers = keras.optimizers, keras.layers


def plain():
    return [layers.Dense(8, "relu", kernel_constraint="max_norm", kernel_regularizer="l2")]


def free():
    return [layers.Dense(8, "relu")]


def rich():
    return [*plain(), layers.BatchNormalization(), layers.Dropout(0.3)]


def with_gradients():
    return [*every(), Penalized(), Dropping()]


decay = optimizers.schedules.ExponentialDecay(0.05, 7, 0.8)
steady = optimizers.schedules.PolynomialDecay(0.1, 1, 0.1)
doubled = optimizers.schedules.PolynomialDecay(0.12, 4, 0.2)
"""The rates that follow from 0.1 with two workers, scaled linearly, with a warm-up of 5 steps."""
in_cluster = "TF_CONFIG" in os.environ
RECIPES = {
    "sgd": lambda: (optimizers.SGD(0.1), rich),
    "momentum": lambda: (optimizers.SGD(0.1, momentum=0.9, nesterov=True), rich),
    "adam": lambda: (optimizers.Adam(0.01), rich),
    "adagrad": lambda: (optimizers.Adagrad(0.1), rich),
    "everything": lambda: (optimizers.AdamW(decay, weight_decay=0.01, global_clipnorm=0.5, use_ema=True), rich),
    "accumulation": lambda: (optimizers.Adam(0.01, gradient_accumulation_steps=3), rich),
    "float16": lambda: (
        optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**18, dynamic_growth_steps=9),
        rich,
    ),
    "gradients": lambda: (optimizers.SGD(0.1), with_gradients),
    "frozen": lambda: (optimizers.Adam(0.01), lambda: [layers.BatchNormalization()]),
    "plain gradients": lambda: (optimizers.SGD(0.1), every),
    "plain averaged": lambda: (optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3), plain),
    "plain sgd": lambda: (optimizers.SGD(0.1), plain),
    "plain momentum": lambda: (optimizers.SGD(0.1, momentum=0.9), plain),
    "plain adam": lambda: (optimizers.Adam(0.01), plain),
    "plain adagrad": lambda: (optimizers.Adagrad(0.1), plain),
    "plain clipped": lambda: (optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True), plain),
    "plain accumulation": lambda: (optimizers.Adam(0.01, gradient_accumulation_steps=3), plain),
    "plain scaled": lambda: (optimizers.SGD(steady if in_cluster else doubled, momentum=0.9), plain),
    "plain local": lambda: (optimizers.Adam(0.01), free),
    "plain on bfloat16": lambda: (optimizers.Adam(0.01), plain),
    "plain on float16": lambda: (optimizers.Adam(0.01), plain),
    "plain float16": lambda: (optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=64.0), plain),
}
RULES = {
    "plain scaled": {"learning_rate": tfdist.LearningRate(scale="linear", warmup_steps=5)} if in_cluster else {},
    "plain local": {"updates": tfdist.Updates(local_steps=2)} if in_cluster else {},
    "plain on bfloat16": {"wire": "bfloat16"},
    "plain on float16": {"wire": "float16"},
}


if batch == len(X):
    Pacing.in_flight = 1  # type: ignore[assignment, method-assign] # a property of the class, for this process alone


def data(shard):
    if batch == len(X):
        return tf.data.Dataset.from_tensors((X, Y)).repeat()
    return tf.data.Dataset.from_tensor_slices((X, Y)).shard(shard.count, shard.index).batch(batch).repeat()


written = {}
for name in names:
    keras.utils.set_random_seed(11)
    keras.config.set_dtype_policy("mixed_float16" if name in ("float16", "plain float16") else "float32")
    with tfdist.scope():
        optimizer, hidden = RECIPES[name]()
        model = keras.Sequential([keras.Input((6,)), *hidden(), layers.Dense(3, dtype="float32")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    if name == "frozen":
        for variable in model.trainable_variables:
            variable.trainable = False
    # The validation data has 61 examples, so that no number of workers divides it.
    history = tfdist.fit(
        model, data, epochs=2, steps_per_epoch=STEPS // 2, steps_per_execution=2, validation_data=(X[:61], Y[:61]),
        share="copy" if batch == len(X) else "split", **RULES.get(name, {}),
    )  # fmt: skip
    for number, variable in enumerate([*model.variables, *model.optimizer.variables]):
        written[f"{name}/{number:02}/{variable.path}"] = variable.numpy()
    for metric, values in history.history.items():
        written[f"{name}/history/{metric}"] = np.array(values)
written["meshed"] = np.array(join.join().all_reduce is not None)
np.savez(f"{out}.npz", **written)
print("done")
