"""The sums of rows are those of `tf.math.unsorted_segment_sum`, to the bit: terms are added in their order."""

import pytest
import tensorflow as tf

from tfdist_cli.train.optimizers.row_sums import LEAST, row_sums

ROWS, LOOKUPS = 90, 2 * LEAST


def terms(lookups, shape, dtype="float32"):
    values = tf.cast(tf.random.stateless_normal([lookups, *shape], [1, 2]), dtype)
    return values, tf.random.stateless_uniform([lookups], [3, 4], 0, ROWS, tf.int32)


def traced(shape, dtype, indices=tf.int32, lookups=LOOKUPS):
    """The sums of values and of their squares, for any number of rows."""
    spec = [tf.TensorSpec([lookups, *shape], dtype), tf.TensorSpec([lookups], indices), tf.TensorSpec([], tf.int32)]
    function = tf.function(lambda v, i, n: row_sums([v, tf.square(v)], i, n), input_signature=spec, autograph=False)
    return function.get_concrete_function()


def same(found, values, indices):
    for own, terms in zip(found, (values, tf.square(values)), strict=True):
        expected = tf.math.unsorted_segment_sum(terms, indices, ROWS + 5)
        assert own.shape == expected.shape
        assert own.dtype == expected.dtype
        assert bool(tf.reduce_all(own == expected))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (3, 4), (31,), (32,), (40,), (64,)])
def test_sums_are_those_of_segments(shape, dtype):
    for lookups in (0, 1, LOOKUPS):
        function = traced(shape, dtype, lookups=lookups)
        values, indices = terms(lookups, shape, dtype)
        same(function(values, indices, tf.constant(ROWS + 5)), values, indices)


def test_rows_may_be_numbered_by_int64():
    values, indices = terms(LOOKUPS, (64,))
    function = traced((64,), "float32", tf.int64)
    same(function(values, tf.cast(indices, tf.int64), tf.constant(ROWS + 5)), values, indices)


def test_a_row_that_does_not_exist_is_an_error():
    values, indices = terms(LOOKUPS, (8,))
    with pytest.raises(tf.errors.InvalidArgumentError):
        row_sums([values], indices + 3, ROWS)


@pytest.mark.parametrize(
    ("shape", "product"), [((), False), ((1,), False), ((16,), True), ((40,), False), ((64,), True)]
)
def test_the_faster_operation_is_chosen(shape, product):
    operations = {op.type for op in traced(shape, "float32").graph.get_operations()}
    assert ("SparseTensorDenseMatMul" in operations) is product
    assert ("UnsortedSegmentSum" in operations) is not product


@pytest.mark.parametrize("lookups", [None, LEAST - 1])
def test_segments_are_summed_unless_there_are_many_lookups(lookups):
    operations = {op.type for op in traced((16,), "float32", lookups=lookups).graph.get_operations()}
    assert "SparseTensorDenseMatMul" not in operations


def test_gpus_sum_segments(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: ["GPU:0"] if kind == "GPU" else [])
    operations = {op.type for op in traced((16,), "float32").graph.get_operations()}
    assert "SparseTensorDenseMatMul" not in operations
