"""Softmax regression on MNIST, read from `params.path`."""

import keras
import tensorflow as tf

from tfdist_cli.datasets import mnist


def model(params):
    classifier = keras.Sequential([keras.Input((mnist.PIXELS,)), keras.layers.Dense(mnist.CLASSES)])
    classifier.compile(
        optimizer=keras.optimizers.SGD(params["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices(mnist.load(params["path"], split)).shard(shard.count, shard.index)
