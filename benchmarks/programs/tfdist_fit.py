"""tfdist with Keras 3: the same program on every task of a cluster of either kind, and in one process."""

from typing import Any

import keras

import tfdist_cli as tfdist
from benchmarks.programs.data import batches
from benchmarks.workload import (
    BLOCKS,
    CLASSES,
    DROPOUT,
    FEATURES,
    FOREVER,
    HEADS,
    HIDDEN,
    IDS,
    LENGTH,
    MODEL_WIDTH,
    WIDTH,
    WORDS,
    Stopwatch,
    Workload,
)

workload = Workload.read()
stopwatch = Stopwatch(workload, reports=tfdist.is_chief())


def mlp() -> list[keras.layers.Layer]:
    return [keras.layers.Dense(units, activation="relu") for units in HIDDEN]


def cnn() -> list[keras.layers.Layer]:
    side = round(FEATURES**0.5)
    return [
        keras.layers.Reshape([side, side, 1]),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
    ]


def embedding() -> keras.Model:
    numbers = keras.Input([IDS], dtype="int32")
    each = IDS // workload.tables
    found = [
        keras.layers.Embedding(workload.rows // workload.tables, WIDTH)(numbers[:, first : first + each])
        for first in range(0, IDS, each)
    ]
    joined = keras.layers.Concatenate(axis=1)(found) if len(found) > 1 else found[0]
    return keras.Model(numbers, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(joined)))


class Positions(keras.layers.Layer):
    """Adds a vector for each position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="normal", name="positions")

    def call(self, x: Any) -> Any:
        return x + self.table


def transformer() -> keras.Model:
    words = keras.Input([LENGTH], dtype="int32")
    x = Positions()(keras.layers.Embedding(WORDS, MODEL_WIDTH, embeddings_initializer="normal")(words))
    for _ in range(BLOCKS):
        attention = keras.layers.MultiHeadAttention(HEADS, MODEL_WIDTH // HEADS, dropout=DROPOUT)
        seen = attention(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(DROPOUT)(seen))
        hidden = keras.layers.Dense(MODEL_WIDTH)(keras.layers.Dense(4 * MODEL_WIDTH, activation="relu")(x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(DROPOUT)(hidden))
    return keras.Model(words, keras.layers.Dense(WORDS)(x))


shard = {} if workload.spread is None else {"shard": tfdist.ShardRule(min_bytes=workload.spread)}
with tfdist.scope(**shard):
    if workload.model == "embedding":
        model, optimizer = embedding(), keras.optimizers.Adagrad(0.5)
    elif workload.model == "transformer":
        model, optimizer = transformer(), keras.optimizers.Adam(3e-3)
    else:
        hidden = {"mlp": mlp, "cnn": cnn}[workload.model]()
        model = keras.Sequential([keras.Input([FEATURES]), *hidden, keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

tfdist.fit(
    model,
    lambda _: batches(workload),
    epochs=FOREVER,
    steps_per_epoch=workload.steps,
    share="copy",
    steps_per_execution=workload.steps_per_execution,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    wire=workload.wire,
    updates=tfdist.Updates(**workload.updates),
)
