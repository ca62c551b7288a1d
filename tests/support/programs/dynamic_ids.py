"""Trains a dynamic table whose rows are known after any number of steps, and prints the largest difference as JSON.

dynamic_ids.py CHECKPOINTS STEPS MIN_BYTES
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist

folder, steps, min_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
IDS, WIDTH, RATE = 3000, 4, 300.0
FACTOR, OFFSET = 2654435761, -(2**62)
INITIAL = keras.initializers.RandomUniform(seed=3)


def ids_of(numbers):
    return numbers * FACTOR + OFFSET


def data(shard):
    """Batches with each id once, in another order for each worker, so workers create the same rows at the same time."""
    numbers = tf.data.Dataset.random(seed=shard.index + 1).batch(IDS)
    order = numbers.map(lambda drawn: ids_of(tf.cast(tf.argsort(drawn), tf.int64)))
    return order.map(lambda ids: (ids, tf.zeros([IDS, 1])))


with tfdist.scope(shard=tfdist.ShardRule(min_bytes=min_bytes)):
    ids = keras.Input((), dtype="int64")
    table = tfdist.layers.DynamicEmbedding(WIDTH, IDS, embeddings_initializer=INITIAL)
    model = keras.Model(ids, keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, axis=1, keepdims=True))(table(ids)))
    # The gradient of each row in a step is 1 / IDS, whatever its values.
    model.compile(keras.optimizers.SGD(RATE), lambda y, prediction: prediction)
checkpoints = tfdist.Checkpoints(folder, every_steps=4, full_every=10)
tfdist.fit(model, data, max_steps=steps, steps_per_epoch=steps, checkpoints=checkpoints)
if tfdist.is_chief():
    found, rows = table.vocabulary()
    order = np.argsort(found)
    whole = np.asarray(table.embeddings.value)[rows[order]]
    numbers = (found[order] - OFFSET) // FACTOR
    initial = np.asarray(table.index.initial_rows(tf.constant(found[order])))
    scores = tfdist.evaluate(model, lambda shard: data(shard).take(1), steps=1)
    print(
        json.dumps(
            {
                "ids": len(found),
                "all": bool((numbers == np.arange(IDS)).all()),
                "worst": float(np.abs(whole - (initial - RATE * steps / IDS)).max()),
                "loss": float(scores["loss"] - np.float64(whole).sum(axis=1).mean()),
                "shards": len(getattr(table.embeddings.value, "variables", [None])),
            }
        )
    )
