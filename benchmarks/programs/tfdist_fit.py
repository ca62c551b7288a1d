"""tfdist with Keras 3: the same program on every task of a cluster of either kind, and in one process."""

import keras

import tfdist_cli as tfdist
from benchmarks.programs.data import batches
from benchmarks.workload import CLASSES, FEATURES, HIDDEN, Stopwatch, Workload

workload = Workload.read()
stopwatch = Stopwatch(workload)

with tfdist.scope():
    model = keras.Sequential([keras.Input([FEATURES])])
    for units in HIDDEN:
        model.add(keras.layers.Dense(units, activation="relu"))
    model.add(keras.layers.Dense(CLASSES))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, metrics=["accuracy"])

tfdist.fit(
    model,
    lambda _: batches(workload),
    epochs=workload.epochs + 1,
    steps_per_epoch=workload.steps,
    steps_per_execution=workload.steps_per_execution,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
)
if tfdist.is_chief():
    stopwatch.write()
