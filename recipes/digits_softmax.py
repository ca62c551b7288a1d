"""Softmax regression on the 8 × 8 digits that come with tfdist."""

import keras
import tensorflow as tf

from tfdist_cli.datasets import digits


def model(params):
    classifier = keras.Sequential([keras.Input((digits.PIXELS,)), keras.layers.Dense(digits.CLASSES)])
    classifier.compile(
        optimizer=keras.optimizers.SGD(params["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices(digits.load(split)).shard(shard.count, shard.index)
