"""Pipelines that would give other elements on data workers are rejected."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.service_support import check_served

map_and_batch = tf.data.experimental.map_and_batch
NUMBERS = tf.data.Dataset.range(12)
FILES = tf.data.Dataset.from_tensor_slices(["a", "b"])


def python(value):
    return tf.numpy_function(np.abs, [value], tf.int64)


@pytest.mark.parametrize(
    "dataset",
    [
        NUMBERS.map(python),
        NUMBERS.interleave(lambda value: tf.data.Dataset.from_tensors(value).map(python)).batch(3),
        NUMBERS.map(lambda value: tf.py_function(abs, [value], tf.int64)),
        tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int64)),
    ],
)
def test_python_code_is_not_on_the_data_workers(dataset):
    with raises(TrainingError, "python-code-in-data"):
        check_served(dataset, 1)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (NUMBERS.take(3).map(abs), "take"),
        (NUMBERS.skip(3).shuffle(4), "skip"),
        (NUMBERS.shard(2, 0), "shard"),
        (tf.data.Dataset.zip((NUMBERS, NUMBERS)), "zip (or enumerate)"),
        (NUMBERS.enumerate(), "zip (or enumerate)"),
        (NUMBERS.cache(), "cache"),
        (NUMBERS.scan(tf.constant(0, tf.int64), lambda old, new: (old + new, old)), "scan"),
        (NUMBERS.take_while(lambda value: value < 3), "take_while"),
        (NUMBERS.batch(5, drop_remainder=True).prefetch(1), "batch(..., drop_remainder=True)"),
        (NUMBERS.batch(5, drop_remainder=True, num_parallel_calls=2), "batch(..., drop_remainder=True)"),
        (NUMBERS.padded_batch(5, drop_remainder=True), "padded_batch(..., drop_remainder=True)"),
        (NUMBERS.batch(4).rebatch(5, drop_remainder=True), "rebatch(..., drop_remainder=True)"),
        (NUMBERS.window(5, drop_remainder=True), "window(..., drop_remainder=True)"),
        (NUMBERS.window(4), "window"),
        (NUMBERS.window(4, shift=1).flat_map(lambda part: part.batch(4)).batch(4), "window"),
        (NUMBERS.bucket_by_sequence_length(tf.size, [3], [2, 2]), "group_by_window (or bucket_by_sequence_length)"),
        (
            NUMBERS.group_by_window(lambda value: value % 2, lambda _, part: part.batch(3), 3).unbatch().batch(4),
            "group_by_window (or bucket_by_sequence_length)",
        ),
        (NUMBERS.apply(map_and_batch(abs, 5, drop_remainder=True)), "map_and_batch(..., drop_remainder=True)"),
    ],
)
def test_what_counts_is_refused_with_several_data_workers(dataset, name):
    check_served(dataset, 1)
    with raises(TrainingError, "data-counts-elements") as raised:
        check_served(dataset, 2)
    assert f" {name}, " in str(raised.value)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (NUMBERS.batch(5).map(abs), "batch"),
        (NUMBERS.batch(5).concatenate(NUMBERS.batch(5)), "batch"),
        (NUMBERS.padded_batch(5).prefetch(1), "padded_batch"),
        (NUMBERS.batch(4).rebatch(5), "rebatch"),
    ],
)
def test_batches_that_cannot_be_put_together_again_are_refused_with_several_data_workers(dataset, name):
    check_served(dataset, 1)
    with raises(TrainingError, "data-groups-elements") as raised:
        check_served(dataset, 2)
    assert f" {name}: " in str(raised.value)


@pytest.mark.parametrize(
    "dataset",
    [
        NUMBERS.shard(1, 0).map(abs, num_parallel_calls=2).filter(lambda value: value > 3).shuffle(3).batch(4),
        FILES.interleave(lambda file: tf.data.TextLineDataset(file).skip(1)).batch(2),
        FILES.flat_map(lambda file: tf.data.TextLineDataset(file).padded_batch(2)),
        FILES.flat_map(
            lambda file: tf.data.TextLineDataset(file).window(4, shift=1).flat_map(lambda part: part.batch(4))
        ).batch(2),
        NUMBERS.batch(5).map(abs).unbatch().ragged_batch(2),
        tf.data.TFRecordDataset(["a", "b"]).map(lambda record: record).prefetch(2),
        NUMBERS.concatenate(NUMBERS).with_options(tf.data.Options()),
    ],
)
def test_everything_else_is_served(dataset):
    check_served(dataset, 8)
