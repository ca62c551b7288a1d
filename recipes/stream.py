"""Clicks on items that appear while the training runs: their table creates rows, and replaces those of old items.

Of the items that exist at a time, new ones are clicked most: their ages have Zipf's distribution. An item's probability
of a click is drawn from its number. The test split follows the training data in time.
"""

import keras
import tensorflow as tf

import tfdist_cli as tfdist

FIRST = 10**12
"""The ids of items are numbers from this one on."""


def model(params):
    item = keras.Input((), dtype="int64", name="item")
    rows = tfdist.layers.DynamicEmbedding(params["dim"], max_bytes=params["max_bytes"], evict="lru")(item)
    clicks = keras.Model(item, keras.layers.Dense(1)(rows))
    clicks.compile(
        optimizer=keras.optimizers.Adam(params["learning_rate"]),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return clicks


def dataset(params, split, shard):
    sizes = params["examples"]
    first = sizes["train"] if split == "test" else 0
    numbers = tf.data.Dataset.range(first, first + sizes[split]).shard(shard.count, shard.index)
    return numbers.map(lambda number: example(params, number))


def example(params, number):
    """Returns the item and the label of an example, by its number in time."""
    items = number // params["per_item"] + 1
    age = tf.cast(tf.cast(items, tf.float32) ** uniform(number, 0), tf.int64)  # log-uniform
    shown = items - age
    label = tf.cast(uniform(number, 1) < uniform(shown, 2), tf.float32)
    return shown + FIRST, label[None]


def uniform(number, salt):
    """Returns a number in [0, 1) for a number."""
    text = tf.strings.join([tf.strings.as_string(number), f":{salt}"])
    return tf.cast(tf.strings.to_hash_bucket_fast(text, 1 << 24), tf.float32) / (1 << 24)
