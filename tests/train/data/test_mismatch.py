"""Data that does not fit the model is named by its element, before the training or in the step that meets it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.mismatch import check_batched_once

pytestmark = pytest.mark.slow

z = np.zeros


def dense(inputs=8, outputs=1, loss="mse"):
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs)])
    model.compile("sgd", loss)
    return model


def two_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(a + b))
    model.compile("sgd", "mse")
    return model


def numbers_and_histories():
    """Has named inputs of other ranks, not in the order of their names."""
    user, history = keras.Input((), name="user"), keras.Input((4,), name="history")
    both = keras.layers.Concatenate()([keras.layers.Reshape((1,))(user), history])
    model = keras.Model({"user": user, "history": history}, keras.layers.Dense(1)(both))
    model.compile("sgd", "mse")
    return model


def two_outputs(named):
    x = keras.Input((4,))
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in "pq"}
    model = keras.Model(x, outputs if named else list(outputs.values()))
    model.compile("sgd", dict.fromkeys("pq", "mse") if named else ["mse", "mse"])
    return model


def table():
    layers = [keras.layers.Embedding(10, 4, name="words"), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile("sgd", "mse")
    return model


def words():
    layers = [keras.layers.StringLookup(vocabulary=["a"]), keras.layers.Embedding(2, 4), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((1,), dtype="string"), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def scores(classes=3):
    return dense(outputs=classes, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


x, y = z((8, 8)), z((8, 1))
CASES = {
    "strings": (dense, (np.array([["a"] * 8] * 8), y), "strings-for-numbers", ["x"]),
    "strings in a dict": (
        two_inputs,
        ({"b": np.array([["a"] * 4] * 8), "a": z((8, 4))}, y),
        "strings-for-numbers",
        ["x['b']"],
    ),
    "strings for targets": (dense, (x, np.array(["a"] * 8)), "strings-for-numbers", ["y"]),
    "a key is missing": (
        two_inputs,
        ({"a": z((8, 4)), "c": z((8, 4))}, y),
        "inputs-do-not-fit",
        ["x", "keys 'a', 'c'", "inputs 'b'"],
    ),
    "one input of two": (two_inputs, (z((8, 4)), y), "inputs-do-not-fit", ["x", "1 array", "2 inputs: 'a', 'b'"]),
    "a dict for one input": (dense, ({"a": x}, y), "inputs-do-not-fit", ["x", "keys 'a'", "one input"]),
    "rank": (dense, (z((8, 8, 3)), y), "shape-does-not-fit", ["x", "(None, 8, 3)", "(None, 8)"]),
    "numbers for rows": (dense, (z(8), y), "shape-does-not-fit", ["x", "(None,)", "(None, 8)"]),
    "width": (dense, (z((8, 7)), y), "shape-does-not-fit", ["x", "(None, 7)", "(None, 8)"]),
    "not batched": (dense, dataset(x, y), "not-batched", ["x", "(8,)"]),
    "batched twice": (dense, dataset(x, y).batch(2).batch(2), "batched-twice", ["x", "(None, None, 8)"]),
    "an output is missing": (
        lambda: two_outputs(True),
        (z((8, 4)), {"p": y}),
        "targets-do-not-fit",
        ["y", "keys 'p'", "outputs 'q'"],
    ),
    "one target of two": (
        lambda: two_outputs(False),
        (z((8, 4)), [y]),
        "targets-do-not-fit",
        ["y", "1 array", "2 outputs"],
    ),
    "width of targets": (lambda: dense(outputs=3), (x, z((8, 2))), "targets-do-not-fit", ["y"]),
    "rank of targets": (lambda: dense(outputs=3), (x, z(8)), "targets-do-not-fit", ["y", "[8] vs. [8,3]"]),
    "label": (scores, (x, np.full(8, 5)), "label-out-of-range", ["y", "label 5", "0 to 2"]),
    "label of many": (lambda: scores(500), (x, np.full(8, -7)), "label-out-of-range", ["y", "label -7", "0 to 499"]),
    "id": (table, (np.full((8, 3), 12), y), "id-out-of-range", ["x", "id 12", "'words'", "0 to 9"]),
    "negative id": (table, (np.full((8, 3), -12), y), "id-out-of-range", ["x", "id -12", "'words'", "0 to 9"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_element_is_named(case):
    build, data, code, values = CASES[case]
    with raises(TrainingError, code) as raised:
        tfdist.fit(build(), data)
    assert str(raised.value).startswith(values[0])
    assert all(value in str(raised.value) for value in values)
    assert "\n" not in str(raised.value)
    assert raised.value.hint


def test_an_evaluation_names_it_too():
    with raises(TrainingError, "id-out-of-range"):
        tfdist.evaluate(table(), (np.full((8, 3), 12), y))


@pytest.mark.parametrize(
    ("build", "data"),
    [
        (words, (np.array([["a"], ["b"]]), z((2, 1)))),
        (dense, ([[1.0] * 8] * 4, [[1.0]] * 4)),
        (lambda: dense(inputs=1), (z(8), y)),  # Keras adds the dimension
        (two_inputs, ({"b": z((8, 4)), "a": z((8, 4)), "more": z(8)}, y)),
        (lambda: two_outputs(True), (z((8, 4)), {"p": y, "q": y}, {"p": z(8), "q": z(8)})),
    ],
)
def test_what_keras_takes_is_trained_on(build, data):
    assert len(tfdist.fit(build(), data).epoch) == 1


def test_named_inputs_are_compared_by_their_names():
    spec = {"user": tf.TensorSpec((None,)), "history": tf.TensorSpec((None, 4))}
    check_batched_once(numbers_and_histories(), (spec, tf.TensorSpec((None,))))
    twice = spec | {"user": tf.TensorSpec((None, 8))}
    with raises(TrainingError, "batched-twice"):
        check_batched_once(numbers_and_histories(), (twice, tf.TensorSpec((None,))))
