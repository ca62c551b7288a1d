"""Models of Keras's examples of structured data: columns of texts and numbers, forests, ratings."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.zoo.case import BATCH, EXAMPLES, adam, case, integers, random, sgd

JOBS, CITIES = ("clerk", "nurse", "smith", "pilot"), ("Oslo", "Lima", "Rome")


def people() -> Any:
    """Columns of integers, numbers and texts, and whether a person is older than 45."""
    source = random()
    x: dict[str, Any] = {
        "age": source.integers(17, 80, EXAMPLES),
        "hours": source.normal(40, 10, EXAMPLES).astype(np.float32),
        "job": source.choice(JOBS, EXAMPLES),
        "city": source.choice(CITIES, EXAMPLES),
    }
    return x, (x["age"] > 45).astype(np.int32)


def weighed_people() -> Any:
    """The same, with a weight for each person."""
    return *people(), random().uniform(0.5, 2.0, EXAMPLES).astype(np.float32)


def _columns(shape: tuple[int, ...] = ()) -> dict[str, Any]:
    kinds = {"age": "int64", "hours": "float32", "job": "string", "city": "string"}
    return {name: keras.Input(shape, name=name, dtype=kind) for name, kind in kinds.items()}


def _embedded(inputs: dict[str, Any], size: int) -> dict[str, Any]:
    """Returns a vector for each column of texts."""
    found = {}
    for name, vocabulary in (("job", JOBS), ("city", CITIES)):
        index = layers.StringLookup(vocabulary=vocabulary, mask_token=None, num_oov_indices=0)(inputs[name])
        found[name] = layers.Embedding(len(vocabulary), size)(index)
    return found


def _binary(inputs: Any, features: Any) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(features))
    model.compile(sgd(), "binary_crossentropy", metrics=[keras.metrics.BinaryAccuracy(name="accuracy")])
    return model


@case(people, example="structured_data/structured_data_classification_with_feature_space")
def feature_space():
    space = keras.utils.FeatureSpace(
        features={
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "hours": "float_normalized",
            "job": "string_categorical",
            "city": keras.utils.FeatureSpace.string_hashed(num_bins=5),
        },
        crosses=[("job", "city")],
        crossing_dim=8,
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(people()[0]))
    return _binary(space.get_inputs(), layers.Dense(8, "relu")(space.get_encoded_features()))


class GatedResidual(layers.Layer):
    """A dense block whose output passes a gate, and is added to its input."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.first, self.second = layers.Dense(units, "elu"), layers.Dense(units)
        self.gate, self.linear = layers.Dense(units, "sigmoid"), layers.Dense(units)
        self.norm, self.project = layers.LayerNormalization(), layers.Dense(units)

    def call(self, x: Any) -> Any:
        hidden = self.second(self.first(x))
        if x.shape[-1] != self.units:
            x = self.project(x)
        return self.norm(x + self.linear(hidden) * self.gate(hidden))


class VariableSelection(layers.Layer):
    """Weighs the columns, each with a block of its own."""

    def __init__(self, columns: int, units: int) -> None:
        super().__init__()
        self.blocks = [GatedResidual(units) for _ in range(columns)]
        self.all = GatedResidual(units)
        self.weigh = layers.Dense(columns, "softmax")

    def call(self, columns: Any) -> Any:
        weights = ops.expand_dims(self.weigh(self.all(ops.concatenate(columns, axis=1))), -1)
        each = ops.stack([block(column) for block, column in zip(self.blocks, columns, strict=True)], axis=1)
        return ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), each), axis=1)


@case(weighed_people, example="structured_data/classification_with_grn_and_vsn")
def gated_residual_and_variable_selection():
    inputs = _columns()
    embedded = list(_embedded(inputs, 4).values())
    for name, scale in (("age", 1 / 50), ("hours", 1 / 40)):
        embedded.append(layers.Dense(4)(ops.expand_dims(ops.cast(inputs[name], "float32") * scale, -1)))
    return _binary(inputs, VariableSelection(4, 4)(embedded))


@case(
    weighed_people,
    copies=True,
    tolerance=1e-3,
    why="each worker normalizes by its own batch; normalizing four examples amplifies rounding",
    example="structured_data/tabtransformer",
)
def tab_transformer_of_texts():
    inputs = _columns((1,))
    columns = layers.concatenate(list(_embedded(inputs, 4).values()), axis=1)
    x = columns + layers.Embedding(2, 4)(ops.arange(2))
    for _ in range(2):
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(2, 4)(x, x))
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(4, "gelu")(x))
    numbers = layers.concatenate([ops.cast(inputs["age"], "float32") / 50, inputs["hours"] / 40])
    joined = layers.concatenate([layers.Flatten()(x), layers.LayerNormalization(epsilon=1e-6)(numbers)])
    hidden = layers.Dense(8, "selu")(layers.BatchNormalization()(joined))
    return _binary(inputs, layers.BatchNormalization()(hidden))


@case(people, example="structured_data/wide_deep_cross_networks")
def wide_deep_and_cross():
    inputs = _columns((1,))
    codes = [
        layers.StringLookup(vocabulary=known, output_mode="one_hot", num_oov_indices=1)(inputs[name])
        for name, known in (("job", JOBS), ("city", CITIES))
    ]
    age = layers.Normalization(mean=45.0, variance=300.0)(ops.cast(inputs["age"], "float32"))
    first = layers.concatenate([*map(layers.Flatten(), _embedded(inputs, 3).values()), age])
    crossed = first
    for _ in range(2):
        crossed = first * layers.Dense(crossed.shape[-1])(crossed) + crossed
    deep = layers.Dense(8, "relu")(first)
    return _binary(inputs, layers.concatenate([*codes, crossed, deep]))


class DecisionTree(keras.Model):
    """A tree of soft decisions on some of the features, whose leaves are distributions over classes."""

    def __init__(self, depth: int, seed: int, features: int, classes: int) -> None:
        super().__init__()
        self.depth, self.leaves = depth, 2**depth
        used = np.random.default_rng(seed).choice(features, features // 2, replace=False)
        self.used = np.eye(features, dtype=np.float32)[used]
        self.distributions = self.add_weight(
            shape=(self.leaves, classes), initializer="random_normal", name="distributions"
        )
        self.decide = layers.Dense(self.leaves, "sigmoid")

    def call(self, x: Any) -> Any:
        right = ops.expand_dims(self.decide(ops.matmul(x, self.used.T)), axis=2)
        decisions = ops.concatenate([right, 1 - right], axis=2)
        reached, start = ops.ones((ops.shape(x)[0], 1, 1)), 1
        for level in range(self.depth):
            reached = ops.tile(ops.reshape(reached, (-1, 2**level, 1)), (1, 1, 2))
            reached = reached * decisions[:, start : start + 2**level, :]
            start += 2**level
        return ops.matmul(ops.reshape(reached, (-1, self.leaves)), ops.softmax(self.distributions))


class Forest(keras.Model):
    """The mean of several trees."""

    def __init__(self, trees: int) -> None:
        super().__init__()
        self.ensemble = [DecisionTree(3, seed, 8, 3) for seed in range(trees)]

    def call(self, x: Any) -> Any:
        return ops.mean(ops.stack([tree(x) for tree in self.ensemble]), axis=0)


def _measured() -> Any:
    x = random().normal(size=(EXAMPLES, 8)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1).astype(np.int32)


@case(_measured, example="structured_data/deep_neural_decision_forests")
def decision_forest():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, Forest(3)(layers.UnitNormalization()(inputs)))
    model.compile(adam(), "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    return model


class Recommender(keras.Model):
    """Rates pairs of a user and a film. As in the example, one sum is made over the whole batch."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        rule = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-6)}
        self.user, self.user_bias = layers.Embedding(users, 4, **rule), layers.Embedding(users, 1)
        self.film, self.film_bias = layers.Embedding(films, 4, **rule), layers.Embedding(films, 1)

    def call(self, pairs: Any) -> Any:
        user, film = pairs[:, 0], pairs[:, 1]
        match = ops.tensordot(self.user(user), self.film(film), 2)
        return ops.sigmoid(match + self.user_bias(user) + self.film_bias(film))


def _ratings() -> Any:
    return integers(16, 2), random().uniform(0, 1, EXAMPLES).astype(np.float32)


@case(
    _ratings,
    copies=True,
    scored=2 * BATCH,
    why="the prediction of an example depends on its batch",
    example="structured_data/collaborative_filtering_movielens",
)
def collaborative_filtering():
    model = Recommender(16, 16)
    model.compile(sgd(), keras.losses.BinaryCrossentropy())
    return model
