"""Trains one model by several recipes on its cluster, and writes the results.

equivalence.py OUT BATCH RECIPE...

A batch of all the data, 480, is the same for every worker: steps that follow each other then have the same result on
any worker, and asynchronous workers are made to take turns.
"""

import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import unrolling  # type: ignore[import-not-found] # beside this file
from gradient_layers import Dropping, Penalized, every  # type: ignore[import-not-found] # beside this file

import tfdist_cli as tfdist
from tfdist_cli.train.cluster import join
from tfdist_cli.train.cluster.all_reduce.sums import AllReduce
from tfdist_cli.train.engine.pacing import Pacing

out, batch, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
STEPS = 50
random = np.random.default_rng(0)
X = random.normal(size=(480, 6)).astype(np.float32)
Y = (X[:, :3] + random.normal(size=(480, 3))).argmax(axis=1)

IDS = random.integers(0, 60, (480, 3)).astype(np.int32)
optimizers, layers = keras.optimizers, keras.layers


class Tied(layers.Layer):
    """A table that is also read whole."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(60, 4, name="tied")

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return keras.ops.mean(self.table(ids), axis=1) @ keras.ops.transpose(self.table.embeddings)


class Positions(layers.Layer):
    """A larger batch looks up the same rows, once."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(80, 4, name="positions")

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


def looked_up():
    """Three tables, one of them looked up twice, and one by positions."""
    ids = keras.Input((3,), dtype="int32")
    shared = layers.Embedding(60, 4, name="shared")
    wide = layers.Embedding(70, 4, name="other")(ids[:, 2:] + 10)
    wide = Positions()(wide)
    looked = [layers.Flatten()(each) for each in (shared(ids), shared(ids[:, :1]), wide)]
    return keras.Model(ids, layers.Dense(3)(layers.Concatenate()(looked)))


def tied():
    return keras.Sequential([keras.Input((3,), dtype="int32"), Tied(), layers.Dense(3)])


class OwnStep(keras.Model):
    """Two updates in a step."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, predicted)


def own_step():
    model = looked_up()
    return OwnStep(model.inputs, model.outputs)


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
    "rows sgd": lambda: (optimizers.SGD(0.1), looked_up),
    "rows adagrad": lambda: (optimizers.Adagrad(0.1), looked_up),
    "rows rmsprop": lambda: (optimizers.RMSprop(0.01, momentum=0.5), looked_up),
    "rows norm": lambda: (optimizers.Adam(0.01, clipnorm=0.1), looked_up),
    "rows nadam": lambda: (optimizers.Nadam(0.01), looked_up),
    "rows whole": lambda: (optimizers.Adam(0.01), looked_up),
    "rows whole adagrad on float16": lambda: (optimizers.Adagrad(0.1), looked_up),
    "rows adagrad on float16": lambda: (optimizers.Adagrad(0.1), looked_up),
    "rows momentum": lambda: (optimizers.SGD(0.1, momentum=0.9), looked_up),
    "rows adam": lambda: (optimizers.Adam(0.01), looked_up),
    "rows clipped": lambda: (optimizers.Adagrad(0.1, global_clipnorm=0.1, weight_decay=0.01), looked_up),
    "rows averaged": lambda: (optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), looked_up),
    "rows accumulation": lambda: (optimizers.SGD(0.1, gradient_accumulation_steps=3), looked_up),
    "rows tied": lambda: (optimizers.Adagrad(0.1), tied),
    "rows own": lambda: (optimizers.Adagrad(0.1), own_step),
    "rows xla": lambda: (optimizers.Adagrad(0.1), looked_up),
    "rows on float16": lambda: (optimizers.SGD(0.1), looked_up),
    "plain float16": lambda: (optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=64.0), plain),
}
RULES = {
    "plain scaled": {"learning_rate": tfdist.LearningRate(scale="linear", warmup_steps=5)} if in_cluster else {},
    "plain local": {"updates": tfdist.Updates(local_steps=2)} if in_cluster else {},
    "plain on bfloat16": {"wire": "bfloat16"},
    "plain on float16": {"wire": "float16"},
    "rows on float16": {"wire": "float16"},
    "rows adagrad on float16": {"wire": "float16"},
    "rows whole": {"embeddings": None},
    "rows whole adagrad on float16": {"wire": "float16", "embeddings": None},
    "rows xla": {"jit": True},
}


if batch == len(X):
    Pacing.in_flight = 1  # type: ignore[assignment, method-assign] # a property of the class, for this process alone


def looked_up_data(shard):
    return tf.data.Dataset.from_tensor_slices((IDS, Y)).shard(shard.count, shard.index).batch(batch).repeat()


def data(shard):
    if batch == len(X):
        return tf.data.Dataset.from_tensors((X, Y)).repeat()
    return tf.data.Dataset.from_tensor_slices((X, Y)).shard(shard.count, shard.index).batch(batch).repeat()


unrolling.after_loops()  # both follow each other within an epoch
gathers = []
"""The numbers of rows that steps have gathered."""
gather_rows = AllReduce._gather_rows


def counted(task, numbers, rows):
    gathers.append(len(numbers))
    return gather_rows(task, numbers, rows)


AllReduce._gather_rows = counted  # type: ignore[method-assign]
written = {}
for name in names:
    gathers.clear()
    keras.utils.set_random_seed(11)
    keras.config.set_dtype_policy("mixed_float16" if name in ("float16", "plain float16") else "float32")
    with tfdist.scope():
        optimizer, hidden = RECIPES[name]()
        rows = name.startswith("rows")
        own = [] if rows else [keras.Input((6,)), *hidden(), layers.Dense(3, dtype="float32")]
        model = hidden() if rows else keras.Sequential(own)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    if name == "frozen":
        for variable in model.trainable_variables:
            variable.trainable = False
    rules: dict[str, Any] = RULES.get(name, {})  # type: ignore[assignment]
    # The validation data has 61 examples, so that no number of workers divides it.
    history = tfdist.fit(
        model, looked_up_data if rows else data, epochs=2, steps_per_epoch=STEPS // 2, steps_per_execution=2,
        validation_data=((IDS if rows else X)[:61], Y[:61]),
        share="copy" if batch == len(X) else "split",
        **({"embeddings": tfdist.EmbeddingRule(min_bytes=0), **rules} if rows else rules),
    )  # fmt: skip
    for number, variable in enumerate([*model.variables, *model.optimizer.variables]):
        written[f"{name}/{number:02}/{variable.path}"] = variable.numpy()
    written[f"{name}/gathers"] = np.array(len(gathers))
    for metric, values in history.history.items():
        written[f"{name}/history/{metric}"] = np.array(values)
written["meshed"] = np.array(join.join().all_reduce is not None)
np.savez(f"{out}.npz", **written)
print("done")
