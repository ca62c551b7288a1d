"""A recipe's module: the transformer of `sizes.py`, on texts in which a word follows from the one before."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.programs.models import compiled
from benchmarks.sizes import LENGTH, SEEN
from benchmarks.workload import Stopwatch, Workload


def model(_params: dict[str, Any]) -> keras.Model:
    """Returns the compiled model."""
    workload = Workload.read()
    return compiled(keras, workload.size, seed=workload.seed)


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
