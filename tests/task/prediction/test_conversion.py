"""A column becomes the type of an input, or the first value that cannot is named."""

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.task.prediction.conversion import converted

INT32_AFTER_MAX = 2**31


def place(row):
    return f"d.csv:{row + 2}"


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array(["1", "2.0", " 3 ", "-4e0"]), np.int32, [1, 2, 3, -4]),
        (np.array([str(2**62 + 1), "1.0"]), np.int64, [2**62 + 1, 1]),
        (np.array([1.0, -2.0]), np.int32, [1, -2]),
        (np.array(["1.5", "nan"]), np.float32, [1.5, np.nan]),
        (np.array(["a", "1"]), object, ["a", "1"]),
        (np.array([[1, 2], [3, 4]]), np.uint8, [[1, 2], [3, 4]]),
    ],
)
def test_values_that_fit(values, dtype, expected):
    found = converted(values, dtype, column="a", place=place)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(expected, dtype))


@pytest.mark.parametrize(
    ("values", "dtype", "row"),
    [
        (np.array(["1", "abc"]), np.int32, 1),
        (np.array(["1", "1.5"]), np.int32, 1),
        (np.array(["", "1"]), np.int64, 0),
        (np.array(["1", "inf"]), np.int32, 1),
        (np.array(["1", str(INT32_AFTER_MAX)]), np.int32, 1),
        (np.array(["1", f"{INT32_AFTER_MAX}.0"]), np.int32, 1),
        (np.array(["1", "-1"]), np.uint8, 1),
        (np.array(["1", "many"]), np.float32, 1),
        (np.array(["1", None], object), np.int32, 1),
        (np.array([1.0, np.nan]), np.int32, 1),
        (np.array([1, INT32_AFTER_MAX]), np.int32, 1),
        (np.array([[1.0, 2.0], [3.0, 4.5]]), np.int32, 1),
    ],
)
def test_values_that_do_not_fit(values, dtype, row):
    with raises(UsageError, "value-does-not-fit") as caught:
        converted(values, dtype, column="age", place=place)
    assert caught.value.message.startswith(f"{place(row)}:")
    assert "'age'" in caught.value.message


def test_values_of_several_entries_are_no_numbers_of_the_wrong_kind():
    values = np.empty(2, object)
    values[:] = [[1, 2], [3]]
    with pytest.raises((TypeError, ValueError)):
        converted(values, np.float32, column="a", place=place)
