"""Keras 3's own `Model.fit`. Each task of a cluster trains a model of its own, and the first reports."""

import keras

from benchmarks.programs.batches import batches
from benchmarks.programs.models import compiled
from benchmarks.workload import FOREVER, Stopwatch, Workload, take_task_index

workload = Workload.read()
stopwatch = Stopwatch(workload, reports=take_task_index() == 0)
model = compiled(
    keras,
    workload.size,
    seed=workload.seed,
    steps_per_execution=workload.steps_per_execution,
    jit_compile=workload.jit,
)
model.fit(
    batches(workload),
    epochs=FOREVER,
    steps_per_epoch=workload.steps,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    verbose=0,
)
