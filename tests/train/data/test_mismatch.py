"""Data that does not fit the model is named by its element, before the training or in the step that meets it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.errors import TrainingError

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


def scores():
    return dense(outputs=3, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


x, y = z((8, 8)), z((8, 1))
CASES = {
    "strings": (dense, (np.array([["a"] * 8] * 8), y), "x is of strings"),
    "strings in a dict": (
        two_inputs,
        ({"b": np.array([["a"] * 4] * 8), "a": z((8, 4))}, y),
        r"x\['b'\] is of strings",
    ),
    "strings for targets": (dense, (x, np.array(["a"] * 8)), "y is of strings"),
    "a key is missing": (two_inputs, ({"a": z((8, 4)), "c": z((8, 4))}, y), "keys 'a', 'c', and lacks 'b'"),
    "one input of two": (two_inputs, (z((8, 4)), y), "x is 1 array, and the model has 2 inputs: 'a', 'b'"),
    "a dict for one input": (dense, ({"a": x}, y), "x has the keys 'a', and the model has one input, without a key"),
    "rank": (dense, (z((8, 8, 3)), y), r"x has the shape \(None, 8, 3\) in a batch, and the model takes \(None, 8\)"),
    "numbers for rows": (dense, (z(8), y), r"x has the shape \(None,\) in a batch"),
    "width": (dense, (z((8, 7)), y), r"x has the shape \(None, 7\) in a batch"),
    "not batched": (dense, dataset(x, y), r"x has the shape \(8,\).*: the data is not in batches"),
    "batched twice": (dense, dataset(x, y).batch(2).batch(2), "it has been batched twice"),
    "an output is missing": (lambda: two_outputs(True), (z((8, 4)), {"p": y}), "y has the keys 'p', and lacks 'q'"),
    "one target of two": (lambda: two_outputs(False), (z((8, 4)), [y]), "y is 1 array, and the model has 2 outputs"),
    "width of targets": (lambda: dense(outputs=3), (x, z((8, 2))), "y does not fit the model's output, or its loss"),
    "rank of targets": (lambda: dense(outputs=3), (x, z(8)), r"y does not fit .*: shapes \[8\] vs. \[8,3\]"),
    "label": (scores, (x, np.full(8, 5)), "y has the label 5, and the model has outputs for 0 to 2"),
    "id": (table, (np.full((8, 3), 12), y), "x has the id 12, which the table of the layer 'words' does not have"),
    "negative id": (table, (np.full((8, 3), -12), y), "x has the id -12, .*: its ids are 0 to 9"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_element_is_named(case):
    build, data, said = CASES[case]
    with pytest.raises(TrainingError, match=said) as raised:
        tfdist.fit(build(), data)
    assert "\n" not in str(raised.value)
    assert raised.value.hint


def test_an_evaluation_names_it_too():
    with pytest.raises(TrainingError, match="x has the id 12"):
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
