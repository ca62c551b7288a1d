"""tfdist with Keras 3: the same program on every task of a cluster of either kind, in one process, or several apart."""

from typing import Any

import keras

import tfdist_cli as tfdist
from benchmarks.programs.batches import batches
from benchmarks.programs.models import compiled
from benchmarks.workload import FOREVER, Stopwatch, Workload, take_task_index

workload = Workload.read()
stopwatch = Stopwatch(workload, reports=take_task_index() == 0 if workload.apart else tfdist.is_chief())

shard = tfdist.ShardRule() if workload.spread is None else tfdist.ShardRule(min_bytes=workload.spread)
balance: dict[str, Any] = {} if workload.balance is None else {"balance": workload.balance}
with tfdist.scope(shard=shard, **balance):
    model = compiled(keras, workload.size, seed=workload.seed)

tfdist.fit(
    model,
    lambda _: batches(workload),
    epochs=FOREVER,
    steps_per_epoch=workload.steps,
    share="copy",
    steps_per_execution=workload.steps_per_execution,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    wire=workload.wire,
    jit=workload.jit,
    updates=tfdist.Updates(**workload.updates),
    micro_batches=workload.micro_batches,
)
