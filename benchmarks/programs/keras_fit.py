"""Keras 3's own `Model.fit`. Each task of a cluster trains a model of its own, and the first reports."""

import json
import os

import keras

from benchmarks.programs.batches import batches
from benchmarks.programs.models import compiled
from benchmarks.workload import FOREVER, Stopwatch, Workload

workload = Workload.read()
task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
stopwatch = Stopwatch(workload, reports=task["index"] == 0)
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
