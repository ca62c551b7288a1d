"""A dataset function returns the shard that was requested, or it is an error."""

from functools import partial

import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.inputs import as_dataset_function
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.data.sharding.dataset_function import Sharded

SHUFFLED = tf.data.Dataset.range(12).shuffle(12)


@pytest.mark.parametrize("function", [lambda: None, lambda part, whole: None])
def test_a_function_that_takes_no_shard_is_named(function):
    with raises(TrainingError, "dataset-function-takes-no-shard"):
        as_dataset_function(function)


def test_a_function_that_takes_more_than_a_shard_when_asked_to():
    def function(shard, size=3):
        return tf.data.Dataset.range(size)

    assert int(as_dataset_function(function)(Shard()).cardinality()) == 3


DIGITS = tf.data.Dataset.range(6)


def rows(shard):
    yield from range(shard.index, 6, shard.count)


@pytest.mark.parametrize(
    "function",
    [
        lambda shard: DIGITS,
        lambda shard: DIGITS.shuffle(6).map(lambda number: number + 1),
        lambda shard: DIGITS.shuffle(6) if shard.step else DIGITS,
    ],
)
def test_a_function_that_ignores_the_shard_is_named(function):
    sharded = as_dataset_function(function)
    assert sharded(Shard()) is not None  # alone, or where each worker is to see all of the data
    with raises(TrainingError, "shard-ignored") as caught:
        sharded(Shard(1, 2, 1))
    assert "2 workers" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda shard: DIGITS.shard(shard.count, shard.index),
        lambda shard: tf.data.Dataset.from_tensors(1).repeat(6 // shard.count),  # the same for all of them
        lambda shard: tf.random.Generator.from_seed(shard.worker) and DIGITS.map(lambda _: tf.random.uniform([])),
        lambda shard: tf.data.Dataset.from_generator(lambda: rows(shard), output_signature=tf.TensorSpec([], tf.int64)),
    ],
)
def test_a_function_that_reads_the_shard_may_return_anything(function):
    sharded = as_dataset_function(function)
    assert [cardinality(sharded(Shard(n, 2, n))) for n in range(2)] == [cardinality(function(Shard(0, 2)))] * 2


def test_a_function_that_divides_a_dataset_shuffled_without_a_seed():
    def sharded(shard, data):
        return data.shard(shard.count, shard.index).shuffle(3)

    with raises(TrainingError, "shard-of-a-shuffle"):
        Sharded(partial(sharded, data=SHUFFLED), "dataset")(Shard(0, 2))
    assert len(list(Sharded(partial(sharded, data=SHUFFLED), "dataset")(Shard()))) == 12
    in_order = tf.data.Dataset.range(12)
    assert len(list(Sharded(partial(sharded, data=in_order), "dataset")(Shard(0, 2)))) == 6
