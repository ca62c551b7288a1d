"""A multi-layer perceptron on the 8 × 8 digits that come with tfdist."""

import keras
import tensorflow as tf

from tfdist_cli.datasets import digits


def model(params):
    classifier = keras.Sequential([keras.Input((digits.PIXELS,))])
    for units in params["hidden"]:
        classifier.add(keras.layers.Dense(units, activation="relu"))
        classifier.add(keras.layers.Dropout(params["dropout"]))
    classifier.add(keras.layers.Dense(digits.CLASSES))
    learning_rate = keras.optimizers.schedules.CosineDecay(params["learning_rate"], params["decay_steps"], alpha=0.05)
    classifier.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices(digits.load(split)).shard(shard.count, shard.index)
