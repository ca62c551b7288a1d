"""Predictions of one process equal Keras's, whatever the model's inputs and outputs are."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.prediction.function import PredictionFunction
from tfdist_cli.train.prediction.groups import Groups

X = np.random.default_rng(0).normal(size=(45, 3)).astype("float32")


def dense():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Dropout(0.5), layers.Dense(1)])


def several():
    first, second = keras.Input((3,), name="first"), keras.Input((3,), name="second")
    hidden = layers.Concatenate()([first, second])
    outputs = {"a": layers.Dense(1)(hidden), "b": (layers.Dense(2)(hidden), layers.Reshape((3, 2))(hidden))}
    return keras.Model({"first": first, "second": second}, outputs)


def assert_same(ours, kerass):
    tf.nest.assert_same_structure(ours, kerass)
    for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(kerass), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    "data",
    [
        X,
        (X,),
        (X, X[:, :1]),
        tf.data.Dataset.from_tensor_slices(X).batch(7),
        tf.data.Dataset.from_tensor_slices((X, X[:, 0], X[:, 0])).batch(7),
        lambda shard: tf.data.Dataset.from_tensor_slices(X).batch(7).shard(shard.count, shard.index),
    ],
    ids=["an array", "x", "x and y", "a dataset", "a dataset of three parts", "a function"],
)
def test_each_example_is_predicted_once_and_in_order(data):
    model = dense()
    assert_same(tfdist.predict(model, data), model.predict(X, verbose=0))


def test_several_inputs_and_outputs_keep_their_structure():
    model = several()
    data = {"first": X, "second": 2 * X}
    assert_same(tfdist.predict(model, data, batch_size=4), model.predict(data, verbose=0))


def test_several_inputs_in_a_list():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    model = keras.Model(inputs, layers.Add()(inputs))
    assert_same(tfdist.predict(model, [X, X]), 2 * X)


class Doubled(layers.Embedding):
    """Has a `call` of its own."""

    def call(self, inputs):
        return 2 * super().call(inputs)


class Tied(layers.Embedding):
    """Reads the whole table, too."""

    def call(self, inputs):
        return super().call(inputs) + keras.ops.mean(self.embeddings)


@pytest.mark.parametrize("mode", [None, "int8"])
@pytest.mark.slow
def test_embeddings_read_their_rows_if_only_lookups_read_the_table(mode):
    ids = keras.Input((4,), dtype="int32")
    tables = [kind(500, 8, name=kind.__name__) for kind in (layers.Embedding, Doubled, Tied)]
    model = keras.Model(ids, layers.Concatenate()([layers.Flatten()(table(ids)) for table in tables]))
    if mode:
        tables[0].quantize(mode)
    data = tf.data.Dataset.from_tensor_slices(np.random.default_rng(1).integers(-500, 500, (33, 4))).batch(8)
    function = PredictionFunction(model, data.element_spec, tables_bytes=1000)
    batches, predicted = function.compiled(iter(data), tf.constant(9, tf.int64))
    assert int(batches) == 5
    assert_same(predicted.numpy(), model.predict(data, verbose=0))
    by_rows = {table.path for table in function._tables.tables}
    scale = ["Embedding/embeddings_scale"] if mode else []
    assert by_rows == {"Embedding/embeddings", "Doubled/embeddings", *scale}


def test_one_process_reads_the_rows_of_tables_that_training_has_changed(monkeypatch):
    made = []
    init = PredictionFunction.__init__

    def recorded(self, *args, **given):
        init(self, *args, **given)
        made.append(self)

    monkeypatch.setattr(PredictionFunction, "__init__", recorded)
    large, small = layers.Embedding(40_000, 8), layers.Embedding(50, 8)
    ids = keras.Input((2,), dtype="int32")
    model = keras.Model(ids, layers.Add()([large(ids), small(ids)]))
    large.embeddings.value.scatter_add(tf.IndexedSlices(tf.ones([1, 8]), tf.constant([7])))
    data = np.array([[7, 8], [-1, 0], [49, 7]])
    np.testing.assert_array_equal(tfdist.predict(model, data, batch_size=2), model(data))
    (function,) = made
    graph = function.compiled.get_concrete_function().graph
    captured = {id(inner): outer for outer, inner in graph.captures}
    read = [captured[id(op.inputs[0])] for op in graph.get_operations() if op.type == "ReadVariableOp"]
    assert [each is small.embeddings.value.handle for each in read] == [True]


def test_strings_are_predicted():
    words = layers.StringLookup(vocabulary=["a", "b"], invert=True)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), words])
    predicted = tfdist.predict(model, np.array([[1], [2], [0]]))
    assert predicted.ravel().tolist() == [b"a", b"b", b"[UNK]"]


class Halves(keras.Model):
    """Has a `predict_step` of its own, and no variables before it is called."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def predict_step(self, data):
        return super().predict_step(data) / 2


def test_a_predict_step_is_called():
    model = Halves()
    predicted = tfdist.predict(model, X)
    assert_same(predicted, np.asarray(model(X)) / 2)


def test_steps_divide_arrays_as_in_keras():
    model = dense()
    expected = model.predict(X, steps=4, verbose=0)
    assert_same(tfdist.predict(model, X, steps=4), expected)


def test_steps_limit_the_batches():
    endless = tf.data.Dataset.from_tensor_slices(X).batch(5).repeat()
    assert tfdist.predict(dense(), endless, steps=11).shape == (55, 1)
    with raises(TrainingError, "endless-prediction-data"):
        tfdist.predict(dense(), endless)
    with raises(UsageError, "invalid-argument"):
        tfdist.predict(dense(), X, steps=0)


def test_no_examples_have_no_predictions():
    nothing = tf.data.Dataset.from_tensor_slices(X).batch(5).take(0)
    assert tfdist.predict(dense(), nothing).shape == (0, 1)


class Counts(layers.Layer):
    """Counts what it is called with."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def test_a_model_that_assigns_variables_is_refused():
    with raises(TrainingError, "prediction-assigns"):
        tfdist.predict(keras.Sequential([keras.Input((3,)), Counts()]), X)


def test_an_output_without_examples_is_refused():
    x = keras.Input((3,))
    with raises(TrainingError, "prediction-not-an-array"):
        tfdist.predict(keras.Model(x, keras.ops.sum(x)), X)


def test_several_tasks_refuse_shuffled_data():
    ordered = tf.data.Dataset.from_tensor_slices(X)
    with raises(TrainingError, "prediction-data-shuffled"):
        Groups.of(lambda _: ordered.shuffle(5).batch(4), 2, None)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tasks_take_groups_in_turn_and_can_continue_at_any(count):
    groups = Groups.of(lambda _: tf.data.Dataset.range(100).batch(3), count, steps=31)
    seen = {}
    for index in range(count):
        for first in (index, index + count):
            for number, batch in enumerate(groups.batches(index, first)):
                group = first + number // groups.size * count
                seen.setdefault(group, {}).setdefault(number % groups.size, set()).add(tuple(batch.numpy()))
    ordered = [seen[group][place] for group in sorted(seen) for place in sorted(seen[group])]
    assert [batch for one in ordered for batch in one] == [tuple(range(3 * n, min(3 * n + 3, 100))) for n in range(31)]


def padded(lengths):
    """A model that predicts sequences, and batches of them, padded to the longest one of each batch."""
    x = keras.Input((None, 2))
    outputs = {"per step": layers.Dense(3)(x), "pairs": x @ keras.ops.swapaxes(x, 1, 2), "last": layers.GRU(2)(x)}
    random = np.random.default_rng(0)
    rows = [random.normal(size=(length, 2)).astype(np.float32) for length in lengths]
    spec = tf.TensorSpec([None, 2])
    data = tf.data.Dataset.from_generator(lambda: rows, output_signature=spec).padded_batch(3)
    return keras.Model(x, outputs), data


@pytest.mark.parametrize("lengths", [[4, 2, 1, 3, 5, 2, 2, 1], [3] * 7, [2, 3, 1]], ids=["ragged", "equal", "one"])
def test_batches_that_are_padded_to_different_lengths_are_predicted_as_in_keras(lengths):
    model, data = padded(lengths)
    seen = []
    note = keras.callbacks.LambdaCallback()
    note.on_predict_batch_end = lambda batch, logs: seen.append((batch, logs["per step"].shape))
    kerass = model.predict(data, verbose=0, callbacks=[note])
    hooks, seen = seen, []
    for given in ({}, {"callbacks": [note]}):
        ours = tfdist.predict(model, data, **given)
        assert ours.keys() == kerass.keys()
        for name, expected in kerass.items():
            found = ours[name]
            assert type(found) is type(expected)
            if isinstance(found, tf.RaggedTensor):
                assert found.shape.as_list() == expected.shape.as_list()
                for splits, own in zip(found.nested_row_splits, expected.nested_row_splits, strict=True):
                    np.testing.assert_array_equal(splits, own)
            one, other = (each.flat_values if isinstance(each, tf.RaggedTensor) else each for each in (found, expected))
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert seen == hooks


class Predicts(keras.callbacks.Callback):
    """Records the hooks of a prediction, changes a weight after each batch, and ends the prediction after some."""

    def __init__(self, ends_at=None):
        super().__init__()
        self.calls, self.ends_at = [], ends_at

    def on_predict_begin(self, logs=None):
        self.calls.append("begin")

    def on_predict_batch_begin(self, batch, logs=None):
        self.calls.append(batch)

    def on_predict_batch_end(self, batch, logs=None):
        self.calls.append((batch, np.asarray(logs["outputs"]).round(4).tolist()))
        self.model.layers[-1].bias.assign_add([1.0])
        self.model.stop_predicting = batch == self.ends_at

    def on_predict_end(self, logs=None):
        self.calls.append("end")


@pytest.mark.parametrize(("size", "ends_at"), [(1, None), (1, 2), (3, None)])
def test_callbacks_are_called_as_in_keras(size, ends_at):
    model, ours, expected = dense(), Predicts(ends_at), Predicts(ends_at)
    model.compile(steps_per_execution=size)
    before = model.get_weights()
    own = tfdist.predict(model, X, batch_size=10, callbacks=[ours])
    model.set_weights(before)
    assert_same(own, model.predict(X, batch_size=10, callbacks=[expected], verbose=0))
    assert ours.calls == expected.calls
