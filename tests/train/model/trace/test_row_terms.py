"""Only rows that are values of the batch may occur several times in an update."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfdist_cli.train.layers.dynamic_embedding import DynamicEmbedding
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.terms import SIZES, SQUARES

WORDS = 20


def table(ids):
    return layers.Embedding(WORDS, 4)(ids)


def shared(ids):
    own, by_position = layers.Embedding(WORDS, 4), Positions()
    by_position.table = own
    return own(ids) + by_position(ids)


def unique(ids):
    own = layers.Embedding(WORDS, 4)
    own.build()

    class Distinct(layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = own

        def call(self, inputs):
            distinct, where = tf.unique(tf.reshape(inputs, [-1]))
            return ops.reshape(tf.gather(self.table(distinct), where), [-1, 3, 4])

    return Distinct()(ids)


class Positions(layers.Layer):
    """The rows of the positions of a sequence; if it has no length, only the batch shows it."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS, 4)

    def call(self, ids):
        return self.table(ops.arange(ops.shape(ids)[1])) + ops.cast(ids, "float32")[..., None]


def positions(ids):
    return Positions()(ids)


def dynamic(ids):
    return DynamicEmbedding(4, capacity=WORDS)(ids)


FOUND = {
    "ids": (table, True),
    "computed ids": (lambda ids: table((ids * 7 + 3) % WORDS), True),
    "ids and positions in one table": (shared, True),
    "ids of a dynamic table": (dynamic, True),
    "positions": (positions, False),
    "positions up to the length": (positions, False),
    "distinct ids": (unique, False),
}


def step_of(features, optimizer="adam", length=3):
    ids = keras.Input((length,), dtype="int32")
    model = keras.Model(ids, layers.Dense(2)(layers.GlobalAveragePooling1D()(features(ids))))
    model.compile(optimizer, "mse")
    step = ModelStep(model)
    spec = tf.TensorSpec([None, length], tf.int32), tf.TensorSpec([None, 2])
    step.build(spec)
    return step, spec


@pytest.mark.parametrize("name", FOUND)
def test_rows_that_each_example_may_look_up(name):
    features, expected = FOUND[name]
    step, spec = step_of(features, length=None if name == "positions up to the length" else 3)
    assert step.lookups(spec).keys() == {0}
    assert step.terms(spec) == ({0: SQUARES} if expected else {})


def test_sparse_ids_are_distinct_before_they_are_looked_up():
    ids = keras.Input((WORDS,), sparse=True, dtype="int32")
    model = keras.Model(ids, layers.Dense(2)(layers.Flatten()(layers.Embedding(WORDS, 4)(ids))))
    model.compile("adam", "mse")
    step = ModelStep(model)
    spec = tf.SparseTensorSpec([None, WORDS], tf.int32), tf.TensorSpec([None, 2])
    step.build(spec)
    assert step.terms(spec) == {}


@pytest.mark.parametrize(("optimizer", "taken"), [("sgd", {}), ("adamax", {0: SIZES}), ("adagrad", {0: SQUARES})])
def test_the_optimizer_decides_what_is_taken(optimizer, taken):
    step, spec = step_of(table, optimizer)
    assert step.terms(spec) == taken
    inner = keras.optimizers.SGD()
    inner.build(step.parameters)
    assert step.terms(spec, inner, step.parameters[1:]) == {}
    assert step.terms(spec, step.optimizer, step.parameters[1:]) == {}


def test_mixed_terms_of_a_batch_are_those_of_keras():
    """A larger batch looks up each id once more, but a position once, with a gradient of all examples."""
    gradients = []
    own = layers.Embedding(WORDS, 1)
    own.build()
    for ids in ([[1, 1]], [[1, 1], [2, 1]]):
        with tf.GradientTape() as tape:
            found = own(np.array(ids)) + own(np.arange(2))
        gradients.append(tape.gradient(found, own.embeddings.value))
    assert [len(each.indices) for each in gradients] == [2 + 2, 4 + 2]
