"""Dense layers on images of digits: softmax regression without `hidden` layers, else a multi-layer perceptron."""

import keras
import tensorflow as tf

from tfdist_cli.datasets import digits, mnist

OPTIMIZERS = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}


def model(params):
    classifier = keras.Sequential([keras.Input((mnist.PIXELS if params["mnist"] else digits.PIXELS,))])
    for units in params["hidden"]:
        classifier.add(keras.layers.Dense(units, activation="relu"))
        if params["dropout"]:
            classifier.add(keras.layers.Dropout(params["dropout"]))
    classifier.add(keras.layers.Dense(digits.CLASSES))
    rate = params["learning_rate"]
    if params["decay_steps"]:
        rate = keras.optimizers.schedules.CosineDecay(rate, params["decay_steps"], alpha=0.05)
    classifier.compile(
        optimizer=OPTIMIZERS[params["optimizer"]](rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


def dataset(params, split, shard):
    """Takes MNIST from the file or folder `params.mnist`; without one, the 8 × 8 digits that come with tfdist."""
    examples = mnist.load(params["mnist"], split) if params["mnist"] else digits.load(split)
    return tf.data.Dataset.from_tensor_slices(examples).shard(shard.count, shard.index)
