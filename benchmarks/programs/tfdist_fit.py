"""tfdist with Keras 3: the same program on every task of a cluster of either kind, and in one process."""

import keras

import tfdist_cli as tfdist
from benchmarks.programs.data import batches
from benchmarks.workload import CLASSES, FEATURES, FOREVER, HIDDEN, IDS, WIDTH, Stopwatch, Workload

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


shard = {} if workload.spread is None else {"shard": tfdist.ShardRule(min_bytes=workload.spread)}
with tfdist.scope(**shard):
    if workload.model == "embedding":
        model, optimizer = embedding(), keras.optimizers.Adagrad(0.5)
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
