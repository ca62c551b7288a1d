"""A small convolutional network, with batch normalization and dropout, on the 8 × 8 digits that come with tfdist."""

import keras
import tensorflow as tf

from tfdist_cli.datasets import digits


def model(params):
    classifier = keras.Sequential([keras.Input((digits.PIXELS,)), keras.layers.Reshape((8, 8, 1))])
    for filters in params["filters"]:
        classifier.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        # Keras's momentum of 0.99 averages over hundreds of steps, which is most of this training.
        classifier.add(keras.layers.BatchNormalization(momentum=0.9))
        classifier.add(keras.layers.ReLU())
        classifier.add(keras.layers.MaxPooling2D())
    classifier.add(keras.layers.Flatten())
    classifier.add(keras.layers.Dropout(params["dropout"]))
    classifier.add(keras.layers.Dense(digits.CLASSES))
    classifier.compile(
        optimizer=keras.optimizers.Adam(params["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


def dataset(params, split, shard):
    examples = tf.data.Dataset.from_tensor_slices(digits.load(split)).shard(shard.count, shard.index)
    if split != "train" or not params["shift"]:
        return examples
    return examples.map(lambda x, y: (shifted(x, params["shift"]), y), num_parallel_calls=tf.data.AUTOTUNE)


def shifted(x, most):
    """Moves a digit by up to `most` pixels in each direction, and fills the edges with paper."""
    image = tf.pad(tf.reshape(x, (8, 8)), [[most, most], [most, most]])
    return tf.reshape(tf.image.random_crop(image, (8, 8)), (digits.PIXELS,))


def callbacks(params):
    return [keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=params["patience"])]
