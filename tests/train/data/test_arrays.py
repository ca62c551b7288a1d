"""Arrays are read as Keras users pass them; what cannot be read is named."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.arrays import as_arrays


class Frame:
    """What pandas has in common: `to_numpy`, and a shape."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def to_numpy(self):
        return self.array


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        (([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 2, 3]), [(3, 2), (3,)]),
        ((((1, 2), (3, 4)), [[1], [2]]), [(2, 2), (2, 1)]),
        ((["a", "b"], [0, 1]), [(2,), (2,)]),
        (([np.float32(1), np.float32(2)],), [(2,)]),
        ((np.zeros((2, 3)), [1, 2], None), [(2, 3), (2,)]),
        ((Frame(np.zeros((4, 2))), Frame(np.zeros(4))), [(4, 2), (4,)]),
        ((tf.zeros([2, 3]),), [(2, 3)]),
    ],
)
def test_lists_of_numbers_are_arrays(given, shapes):
    assert [tuple(array.shape) for array in as_arrays(given)] == shapes


def test_lists_of_arrays_are_several_inputs():
    first, second = as_arrays(([np.zeros((6, 2)), [[1.0]] * 6], {"a": [1] * 6}))
    assert [part.shape for part in first] == [(6, 2), (6, 1)]
    assert second["a"].shape == (6,)


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ((np.zeros(44), np.zeros(20)), "array-lengths-differ", ["x has 44", "y has 20"]),
        (({"a": np.zeros(44), "b": [0] * 20},), "array-lengths-differ", ["x['a'] has 44", "x['b'] has 20"]),
        ((tf.zeros([44, 2]), [1] * 44, [1] * 20), "array-lengths-differ", ["x has 44", "sample_weight has 20"]),
        (([np.zeros(2)] * 8, np.zeros(8)), "array-lengths-differ", ["x[0] has 2", "y has 8"]),
        ((np.zeros(3), 5), "not-an-array", ["y", "int"]),
        ((np.zeros(3), None, np.zeros(3)), "not-an-array", ["y", "NoneType"]),
        ((np.zeros(3), np.zeros(())), "not-an-array", ["y", "single number"]),
        (([[1, 2], [3]],), "ragged-rows", ["x"]),
        ((np.array([[1, "b"], [2, "c"]], object),), "unsupported-array-type", ["x", "int"]),
        (
            (np.zeros(2), np.array(["2026-01-01"], "datetime64[D]")),
            "unsupported-array-type",
            ["y", "datetime64[D]"],
        ),
    ],
)
def test_what_cannot_be_read_is_named(given, code, values):
    with raises(TrainingError, code) as raised:
        as_arrays(given)
    assert str(raised.value).startswith(values[0])
    assert all(value in str(raised.value) for value in values)
    assert raised.value.hint


def test_text_of_pandas_is_read():
    (words,) = as_arrays((Frame(np.array(["a", "b"], object)),))
    assert [word.numpy() for word in tf.data.Dataset.from_tensor_slices(words)] == [b"a", b"b"]
