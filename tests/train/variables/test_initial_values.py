"""Tests of the types in which initial values cross."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.variables.initial_values import carrier_of, check_sent, converted, create_as_carrier

SENT = {"bool", "float16", "float32", "float64", "int32", "int64"}
"""The types that `CollectiveBcastSend` accepts."""
VALUES = {
    "int8": [-128, 127],
    "uint8": [0, 255],
    "int16": [-32768, 32767],
    "uint16": [0, 65535],
    "uint32": [0, 2**32 - 1],
    "uint64": [0, 2**64 - 1],
    "bfloat16": [1 / 3, -np.inf],
    "complex64": [1 + 2j, -np.inf],
}


def created(**kwargs):
    """Returns a variable of one device, and the value that crosses to it."""
    crossed = []

    def create(creator, initial_value, **others):
        value = tf.convert_to_tensor(initial_value() if callable(initial_value) else initial_value)
        crossed.append(value)
        return creator(initial_value=lambda: value, **others)

    return create_as_carrier(create, tf.Variable, kwargs), crossed[0]


@pytest.mark.parametrize("dtype", VALUES)
def test_a_value_crosses_in_a_type_that_is_sent_and_is_the_same_afterwards(dtype):
    value = tf.cast(VALUES[dtype], dtype) if dtype == "bfloat16" else tf.constant(np.array(VALUES[dtype], dtype))
    variable, crossed = created(initial_value=lambda: value, dtype=dtype, name="weight", trainable=False)
    assert crossed.dtype.name in SENT
    assert (variable.dtype, variable.name, variable.trainable) == (value.dtype, "weight:0", False)
    np.testing.assert_array_equal(variable.numpy(), value.numpy())


@pytest.mark.parametrize("dtype", sorted(SENT))
def test_types_that_are_sent_cross_as_they_are(dtype):
    variable, crossed = created(initial_value=tf.ones([2], dtype), dtype=tf.as_dtype(dtype))
    assert crossed.dtype == variable.dtype == dtype


@pytest.mark.parametrize("given", [tf.constant([3], tf.int8), lambda: tf.constant([3], tf.int8), np.int8([3])])
def test_the_type_may_be_that_of_the_value(given):
    variable, crossed = created(initial_value=given)
    assert (variable.dtype, crossed.dtype) == (tf.int8, tf.int32)
    assert variable.numpy().tolist() == [3]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_of_8_bits_cross_as_float32(name):
    dtype = getattr(tf.dtypes.experimental, name)
    value = tf.cast([0.5, -2.0], dtype)
    assert carrier_of(dtype) == tf.float32
    assert tf.cast(converted(converted(value, tf.float32), dtype), tf.float32).numpy().tolist() == [0.5, -2.0]


@pytest.mark.parametrize("dtype", [tf.string, tf.complex128])
def test_a_type_that_nothing_can_carry_is_refused(dtype):
    with raises(TrainingError, "variable-type-not-sent"):
        check_sent(dtype, "the variable")
    with raises(TrainingError, "variable-type-not-sent"):
        created(initial_value="text" if dtype == tf.string else 1j, dtype=dtype, name="text")
