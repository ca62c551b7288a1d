"""A recipe's module: the transformer of `workload.py`, on texts in which a word follows from the one before."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.workload import BLOCKS, DROPOUT, HEADS, LENGTH, MODEL_WIDTH, SEEN, WORDS, Stopwatch, Workload


class Positions(keras.layers.Layer):
    """Adds a vector for each position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="normal", name="positions")

    def call(self, x: Any) -> Any:
        return x + self.table


def model(_params: dict[str, Any]) -> keras.Model:
    words = keras.Input([LENGTH], dtype="int32")
    x = Positions()(keras.layers.Embedding(WORDS, MODEL_WIDTH, embeddings_initializer="normal")(words))
    for _ in range(BLOCKS):
        attention = keras.layers.MultiHeadAttention(HEADS, MODEL_WIDTH // HEADS, dropout=DROPOUT)
        seen = attention(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(DROPOUT)(seen))
        hidden = keras.layers.Dense(MODEL_WIDTH)(keras.layers.Dense(4 * MODEL_WIDTH, activation="relu")(x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(DROPOUT)(hidden))
    built = keras.Model(words, keras.layers.Dense(WORDS)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    return built


def texts(examples: int) -> tf.data.Dataset:
    """Returns word numbers, int32 (64,), and for each the next one of the vocabulary."""
    words = tf.random.stateless_uniform([examples, LENGTH], [0, 4], maxval=SEEN, dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((words, (words + 1) % SEEN))


def dataset(params: dict[str, Any], _split: str, shard: Any) -> tf.data.Dataset:
    """Returns a shard's texts."""
    return texts(params["examples"]).shard(shard.count, shard.index)


def callbacks(_params: dict[str, Any]) -> list[keras.callbacks.Callback]:
    """Returns the callback that records the ends of epochs."""
    stopwatch = Stopwatch(Workload.read(), reports=True)
    return [keras.callbacks.LambdaCallback(on_epoch_end=stopwatch.epoch_ended)]
