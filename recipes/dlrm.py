"""A deep learning recommendation model (DLRM) on lines in Criteo's format.

Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems (2019).
"""

import ctr
import keras
import numpy as np

from tfdist_cli.datasets import criteo

dataset, callbacks = ctr.dataset, ctr.callbacks


def model(params):
    numbers = keras.Input((criteo.NUMBERS,), name="numbers")
    categories = keras.Input((criteo.CATEGORIES,), dtype="int64", name="categories")
    missing = keras.ops.cast(keras.ops.equal(numbers, criteo.MISSING_NUMBER), "float32")
    bottom = hidden(keras.layers.Concatenate()([numbers, missing]), [*params["bottom"], params["dim"]])
    vectors = keras.layers.Embedding(params["rows"], params["dim"], name="table")(categories)
    every = keras.layers.Concatenate(axis=1)([vectors, keras.layers.Reshape((1, params["dim"]))(bottom)])
    top = hidden(keras.layers.Concatenate()([bottom, interactions(every)]), params["top"])
    classifier = keras.Model({"numbers": numbers, "categories": categories}, keras.layers.Dense(1)(top))
    classifier.compile(
        optimizer=keras.optimizers.Adagrad(params["learning_rate"], initial_accumulator_value=1e-4),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return classifier


def hidden(x, widths):
    for units in widths:
        x = keras.layers.Dense(units, activation="relu")(x)
    return x


def interactions(vectors):
    """Returns the product of each pair of vectors, given as (batch, vectors, dim)."""
    count = vectors.shape[1]
    products = keras.ops.matmul(vectors, keras.ops.transpose(vectors, (0, 2, 1)))
    pairs = np.flatnonzero(np.tri(count, k=-1)).tolist()
    return keras.ops.take(keras.layers.Flatten()(products), pairs, axis=1)
