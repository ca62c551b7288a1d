"""tf_keras (Keras 2) on parameter servers, with `DatasetCreator`, or on mirrored workers, depending on `TF_CONFIG`."""

from typing import Any

import tensorflow as tf
import tf_keras as keras

from benchmarks.programs.data import batches
from benchmarks.workload import CLASSES, FEATURES, FOREVER, HIDDEN, IDS, WIDTH, Stopwatch, Workload

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
    if workload.model == "embedding":
        table = keras.layers.Embedding(workload.rows, WIDTH, input_length=IDS)
        model, optimizer = keras.Sequential([table, keras.layers.Flatten()]), keras.optimizers.Adagrad(0.5)
    else:
        model, optimizer = keras.Sequential([keras.Input([FEATURES])]), keras.optimizers.Adam(1e-3)
        for units in HIDDEN:
            model.add(keras.layers.Dense(units, activation="relu"))
    model.add(keras.layers.Dense(CLASSES))
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=workload.steps_per_execution,
    )

model.fit(
    data,
    epochs=FOREVER,
    steps_per_epoch=workload.steps,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)],
    verbose=0,
)
