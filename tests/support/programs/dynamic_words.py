"""Trains a dynamic table that keeps strings on words of Zipf's distribution, and prints what it has kept as JSON.

dynamic_words.py CHECKPOINTS STEPS MODE EVICT
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.words import words
from tfdist_cli.tables.hashing import as_ids

folder, steps, mode, evict = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "lru"
WORDS, KEPT, BATCH, BYTES = 4000, 2000, 500, 32
ALL = words(WORDS)


def data(shard):
    """Batches of words, each worker's own."""

    def batch(step):
        drawn = tf.random.stateless_uniform([BATCH], tf.stack([step, tf.cast(shard.index, tf.int64)]))
        rank = tf.cast(tf.pow(float(WORDS), drawn), tf.int32) - 1
        return tf.gather(ALL, rank), tf.ones([BATCH, 1])

    return tf.data.Dataset.counter().map(batch)


with tfdist.scope(shard=tfdist.ShardRule(min_bytes=1000)):
    given = keras.Input((), dtype="string")
    sizes = {"capacity": KEPT, "evict": "lru"} if evict else {"capacity": WORDS}
    table = tfdist.layers.DynamicEmbedding(4, string_bytes=BYTES, **sizes)
    model = keras.Model(given, keras.layers.Dense(1)(table(given)))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
checkpoints = tfdist.Checkpoints(folder, every_steps=4, full_every=10)
updates = tfdist.Updates(mode=mode)
tfdist.fit(model, data, max_steps=steps, steps_per_epoch=steps, checkpoints=checkpoints, updates=updates)
if tfdist.is_chief():
    strings, rows = table.vocabulary()
    hashes, _ = table.index.ids()
    known = dict(zip(as_ids(np.array(ALL, object)).tolist(), ALL, strict=True))

    def kept(word):
        text = word.decode("utf-8", "surrogateescape")
        return text if len(word) <= BYTES else word[:BYTES].decode("utf-8", "ignore") + "…"

    print(
        json.dumps(
            {
                "ids": len(strings),
                "wrong": [
                    [found, kept(known[number])]
                    for found, number in zip(strings, hashes.tolist(), strict=True)
                    if found != kept(known[number])
                ],
                "long": sum(found.endswith("…") for found in strings),
                "shards": len(getattr(table.embeddings.value, "variables", [None])),
            }
        )
    )
