"""tf_keras (Keras 2) on parameter servers, with `DatasetCreator`, or on mirrored workers, depending on `TF_CONFIG`."""

from typing import Any

import tensorflow as tf
import tf_keras as keras

from benchmarks.programs.batches import batches
from benchmarks.programs.models import compiled
from benchmarks.workload import FOREVER, Stopwatch, Workload

workload = Workload.read()
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
cluster = resolver.cluster_spec()
asynchronous = "ps" in cluster.jobs
stopwatch = Stopwatch(workload, reports=asynchronous or resolver.task_id == 0)

if asynchronous and resolver.task_type != "chief":
    server = tf.distribute.Server(cluster, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc")
    server.join()

strategy: tf.distribute.Strategy
data: Any
if asynchronous:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    data = keras.utils.experimental.DatasetCreator(lambda _: batches(workload))
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    data = strategy.distribute_datasets_from_function(lambda _: batches(workload))

with strategy.scope():
    model = compiled(
        keras, workload.size, seed=workload.seed, steps_per_execution=workload.steps_per_execution, jit_compile=False
    )

model.fit(
    data,
    epochs=FOREVER,
    steps_per_epoch=workload.steps,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    verbose=0,
)
