"""tfdist with Keras 3: the same program on every task of a cluster of either kind, and in one process."""

import keras

import tfdist_cli as tfdist
from benchmarks.programs.data import batches
from benchmarks.workload import CLASSES, FEATURES, HIDDEN, Stopwatch, Workload

workload = Workload.read()
stopwatch = Stopwatch(workload)


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


with tfdist.scope():
    hidden = {"mlp": mlp, "cnn": cnn}[workload.model]()
    model = keras.Sequential([keras.Input([FEATURES]), *hidden, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, metrics=["accuracy"])

tfdist.fit(
    model,
    lambda _: batches(workload),
    epochs=workload.epochs + 1,
    steps_per_epoch=workload.steps,
    steps_per_execution=workload.steps_per_execution,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    wire=workload.wire,
)
if tfdist.is_chief():
    stopwatch.write()
