"""Keras 3's own `Model.fit` of the language model, in one process."""

from benchmarks.programs.language_model import callbacks, model, texts
from benchmarks.workload import FOREVER, Workload

workload = Workload.read()
examples = workload.steps * workload.batch_size
model({}).fit(
    texts(examples).shuffle(examples).batch(workload.batch_size),
    epochs=FOREVER,
    callbacks=callbacks({}),
    verbose=0,
)
