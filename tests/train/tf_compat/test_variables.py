"""Variables: what is private is there, and the public way still does not do."""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import core
from tensorflow.python.ops import stateful_random_ops

from tfdist_cli.train.tf_compat import variables
from tfdist_cli.train.tf_compat.variables import (
    Read,
    ShardedVariable,
    WeightTensor,
    after_assignments,
    keep_row_index,
    move_variable,
    rows_looked_up,
    stored,
)


def test_sharded_variables_have_no_public_class():
    shards = [tf.Variable(tf.ones([2, 3])), tf.Variable(tf.ones([1, 3]))]
    assert ShardedVariable(shards).shape == (3, 3)
    assert ShardedVariable is tf.__internal__.distribute.ShardedVariable
    assert not hasattr(tf.distribute, "ShardedVariable")


def test_what_stores_a_variable_within_a_stateless_scope():
    variable = keras.Variable(1.0)
    assert stored(variable) is variable.value
    assert stored(5) == 5
    with keras.StatelessScope(state_mapping=[(variable, tf.constant(2.0))]):
        assert isinstance(stored(variable), tf.Variable)
        assert not isinstance(variable.value, tf.Variable), "the public value is the variable now"


def test_lookups_get_rows_from_a_function():
    table, other = keras.Variable(np.zeros((5, 2))), keras.Variable(np.ones((5, 2)))
    found = []

    def gather(variable, ids):
        assert variable is table
        found.append(ids.numpy().tolist())
        return tf.fill([len(ids), 2], 7.0)

    ids = np.array([[1, -1], [4, 1]])
    assert not hasattr(table, "sparse_read"), "Keras's variables can be read by rows now"
    with rows_looked_up([table], gather):
        for lookup in (keras.ops.take(table, ids, axis=0), tf.gather(table, tf.constant(ids))):
            np.testing.assert_array_equal(lookup, np.full((2, 2, 2), 7.0))
        ragged = keras.ops.take(table, tf.ragged.constant([[1], [2, 3]]), axis=0)
        assert ragged.row_lengths().numpy().tolist() == [1, 2]
        np.testing.assert_array_equal(keras.ops.take(table, ids), np.zeros((2, 2)))
        np.testing.assert_array_equal(keras.ops.take(other, ids, axis=0), np.ones((2, 2, 2)))
    assert found == [[1, -1, 4, 1], [1, -1, 4, 1], [1, 2, 3]]
    np.testing.assert_array_equal(keras.ops.take(table, ids, axis=0), np.zeros((2, 2, 2)))


def gradient_by_hand(weight):
    """The gradient of a variable that the user's own gradient function computes, with a plain tensor or not."""

    @tf.custom_gradient
    def scaled(x):
        y = x * weight

        def gradient(upstream, variables=()):
            return upstream * 3, [upstream * 5 for _ in variables]

        return y, gradient

    return scaled(tf.constant(2.0))


def test_gradient_functions_see_weights_as_variables():
    value = tf.constant(4.0)

    @tf.function
    def gradient_of(value, bare):
        with tf.GradientTape() as tape:
            tape.watch(value)
            weight = value if bare else WeightTensor(value, "weight")
            y = gradient_by_hand(weight)
        return tape.gradient(y, value, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    assert gradient_of(value, bare=False).numpy() == 5
    assert gradient_of(value, bare=True).numpy() == 0, "gradient functions see tensors now"


def test_rows_of_a_weight():
    weight = WeightTensor(tf.constant([[1.0], [2.0], [3.0]]), "weight")
    assert weight.sparse_read([2, 0]).numpy().tolist() == [[3], [1]]
    assert weight.gather_nd([[1]]).numpy().tolist() == [[2]]


def test_variables_of_one_call():
    @tf.function(autograph=False)
    def counted(start):
        variable = variables.local_variable(start)
        variable.assign_add(1.0)
        return variable.read_value()

    assert [counted(tf.constant(float(n))).numpy() for n in (1, 5)] == [2, 6]

    @tf.function(autograph=False)
    def public(start):
        return tf.Variable(start).assign_add(1.0)

    with pytest.raises(ValueError, match="singleton"):
        public(tf.constant(1.0))


def test_a_variable_that_has_been_read():
    read = Read(tf.constant([1.0, 2.0]))
    read.assign([5.0, 5.0])
    read.assign_add([1.0, 1.0])
    assert (read.dtype, tuple(read.shape), read.ndim) == ("float32", (2,), 1)
    assert keras.ops.convert_to_numpy(read * 2).tolist() == [2, 4]
    assert keras.ops.convert_to_tensor(read).numpy().tolist() == [1, 2]
    assert isinstance(keras.Variable(tf.constant(1.0)).value, tf.Variable), "Keras's variable creates no storage now"


def test_initializers_are_seen_when_storage_is_created(monkeypatch):
    monkeypatch.setattr(core.Variable, "_initialize_with_initializer", core.Variable._initialize_with_initializer)
    seen, by_scope = [], []

    @contextlib.contextmanager
    def around(initializer, shape, dtype):
        seen.append((initializer, shape, dtype))
        yield

    variables.wrap_initialization(around)
    initializer = keras.initializers.RandomNormal()

    def created(creator, **kwargs):
        by_scope.append(kwargs)
        return creator(**kwargs)

    with tf.variable_creator_scope(created):
        keras.Variable(initializer, shape=[2, 3], dtype="float64")
    assert seen == [(initializer, (2, 3), "float64")]
    assert initializer not in by_scope[0].values(), "TensorFlow is told the initializer now"


def test_what_initializers_draw_with():
    seen = []

    def uniform(**given):
        seen.append(given)
        return 7

    draw = types.SimpleNamespace(uniform=uniform)
    initializer = keras.initializers.RandomUniform(0.0, 2.0, seed=3)
    with variables.random_functions(draw):
        assert initializer([2]) == 7
    assert (seen[0]["minval"], seen[0]["maxval"]) == (0, 2)
    seed = variables.seed_tensor(seen[0]["seed"])
    plain = tf.random.stateless_uniform([2], seed, 0.0, 2.0)
    np.testing.assert_array_equal(initializer([2]), plain)


def test_the_public_global_generator_creates_one(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    assert variables.global_generator() is None
    made = tf.random.get_global_generator()
    assert variables.global_generator() is made, "the public function creates none now"


def test_a_variable_that_has_moved_is_the_same_object_with_the_same_value():
    variable = tf.Variable([1.0, 2.0])
    handle = variable.handle
    move_variable(variable, "CPU:0")
    assert variable.handle is not handle
    assert variable.assign_add([1.0, 1.0]).numpy().tolist() == [2.0, 3.0]


def test_a_layer_does_not_track_what_is_kept_with_its_table():
    layer = keras.layers.Layer()
    layer.table = layer.add_weight(shape=(2, 3))
    keep_row_index(layer.table, [keras.Variable("zeros", shape=(4,))])
    assert layer.table.row_index[0].shape == (4,)
    assert layer.variables == [layer.table]


def test_a_function_is_called_after_each_assignment_by_keras():
    variable, seen = keras.Variable([1.0, 2.0]), []
    after_assignments(variable, lambda: seen.append(variable.numpy().tolist()))
    variable.assign([3.0, 4.0])
    with keras.StatelessScope():
        variable.assign([5.0, 6.0])
    variable.assign_add([1.0, 1.0])
    assert seen == [[3.0, 4.0], [4.0, 5.0]]
