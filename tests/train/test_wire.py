"""What is pulled and pushed is what there was, whatever it was joined with on the way."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.wire import Wire

SHAPES = [(2, 3), (), (4,), (1, 0, 2), (3, 1)]


def parameters(dtypes=("float32", "float32", "bfloat16", "float32", "bfloat16")):
    return [
        keras.Variable(np.arange(int(np.prod(shape))).reshape(shape), dtype=dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def same(given, variables):
    for tensor, variable in zip(given, variables, strict=True):
        assert tensor.dtype == variable.dtype
        np.testing.assert_array_equal(tf.cast(tensor, tf.float32), tf.cast(variable.value, tf.float32))


def test_all_values_arrive():
    variables = parameters()
    same(tf.function(Wire(variables).pull)(), variables)


def test_gradients_arrive_and_what_is_not_dense_stays():
    variables = parameters()
    wire = Wire(variables)
    gradients = [tf.convert_to_tensor(variable.value) for variable in variables]
    same(tf.function(wire.push)(gradients), variables)
    rows = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([1]), tf.constant([2, 3]))
    pushed = wire.push([rows, None, *gradients[2:]])
    assert pushed[0] is rows
    assert pushed[1] is None
    same(pushed[2:], variables[2:])


@pytest.mark.parametrize("count", [1, 3])
def test_each_type_crosses_in_one_piece(count):
    variables = [keras.Variable(np.ones((2, 2), np.float32)) for _ in range(count)]
    graph = tf.function(Wire(variables).pull).get_concrete_function().graph
    assert [op.type for op in graph.get_operations()].count("ConcatV2") == (count > 1)


def test_no_parameters():
    assert Wire([]).pull() == []
    assert Wire([]).push([]) == []
