"""Keras 3's own `Model.fit` in one process."""

import keras

from benchmarks.programs.data import batches
from benchmarks.workload import CLASSES, FEATURES, FOREVER, HIDDEN, Stopwatch, Workload

workload = Workload.read()
stopwatch = Stopwatch(workload, reports=True)

model = keras.Sequential([keras.Input([FEATURES])])
for units in HIDDEN:
    model.add(keras.layers.Dense(units, activation="relu"))
model.add(keras.layers.Dense(CLASSES))
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    steps_per_execution=workload.steps_per_execution,
)
model.fit(
    batches(workload),
    epochs=FOREVER,
    steps_per_epoch=workload.steps,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    verbose=0,
)
