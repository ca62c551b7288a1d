"""The length of data: known, counted, or unknown."""

import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.length import cardinality, check_ends, count, counting_function, steps_in, with_length
from tfdist_cli.train.data.shard import Shard


def test_length_of_the_data():
    shards = [Shard(n, 3, n) for n in range(3)]

    def function(shard):
        return tf.data.Dataset.range(10).shard(shard.count, shard.index)

    assert steps_in(function, shards, synchronous=False) == 10
    assert steps_in(function, shards, synchronous=True) == 3
    assert steps_in(lambda shard: function(shard).repeat(), shards, synchronous=True) is None


def test_data_without_an_end_cannot_be_evaluated():
    check_ends(lambda shard: tf.data.Dataset.range(2))
    check_ends(lambda shard: tf.data.Dataset.range(2).filter(lambda _: True))
    with raises(TrainingError, "endless-evaluation-data") as raised:
        check_ends(lambda shard: tf.data.Dataset.range(2).repeat())
    assert "tfdist.Validation(data, steps=...)" in str(raised.value.hint)


def test_counted_data_has_the_counted_length():
    def unknown(shard):
        return tf.data.Dataset.range(7).filter(lambda n: n % 2 == 0).shard(shard.count, shard.index)

    assert [count(unknown, Shard(index, 3, index)) for index in range(3)] == [2, 1, 1]
    counted = with_length(unknown, {(0, 1): 4, (0, 2): 3})
    assert cardinality(counted(Shard(0, 2))) == 3
    assert list(counted(Shard(0, 2)).as_numpy_iterator()) == [0, 4, 0]  # there are fewer now
    assert cardinality(counted(Shard(1, 3))) is None
    assert int(counting_function()(iter(unknown(Shard())))) == 4


def test_cardinality():
    data = tf.data.Dataset.range(6)
    assert cardinality(data) == 6
    assert cardinality(data.repeat()) is None
    assert cardinality(data.filter(lambda _: True)) is None
