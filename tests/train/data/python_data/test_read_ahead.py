"""The end of data of unknown length is found ahead of the steps."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.compare import batches, classifier
from tfdist_cli.train.data.python_data.read_ahead import OwnShard
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine

OPEN = MirroredEngine.open
ROWS = np.arange(20, dtype=np.float32)[:, None]


def odd(shard):
    """Every fourth row, in batches of 2 of which nobody knows how many there are: 1 5, 9 13, 17."""
    rows = tf.data.Dataset.from_tensor_slices((ROWS,)).filter(lambda row: row[0] % 4 == 1)
    return rows.batch(2).shard(shard.count, shard.index)


def firsts(dataset, most):
    return [int(batch[0][0, 0]) for batch in dataset.take(most)]


def test_reading_ahead_finds_the_end_of_the_first_pass():
    function = OwnShard(odd)
    dataset = function(Shard())
    assert [function.ahead(done, 1, most) for done, most in ((0, 2), (0, 9), (2, 9), (3, 9), (4, 9))] == [2, 3, 1, 0, 0]
    assert firsts(dataset, 7) == [1, 9, 17, 1, 9, 17, 1]
    function.forget(3)
    assert firsts(function(Shard(step=3)), 2) == [1, 9]


def test_tensorflow_reads_each_pass_itself_after_the_first_one():
    passes: list[int] = []

    def rows():
        passes.append(len(passes))
        return iter([[10 * passes[-1] + number] for number in range(3)])

    once = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([1], tf.int64))
    function = OwnShard(lambda _: once, by_pass=True)
    assert [int(each[0]) for each in function(Shard())] == [0, 1, 2]
    found = []
    for done in (3, 6, 9):
        assert function.ahead(3, 1, 5) == 0
        dataset = function.next_pass(done)
        assert dataset is not None
        assert function.next_pass(done) is None, "the pass has begun"
        found.append([int(each[0]) for each in dataset.take(3)])
        function.forget(done)
    assert found == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert function._passes[0].alone


def test_what_a_longer_shard_has_left_comes_first_in_the_next_pass():
    function = OwnShard(odd, readers=2, by_pass=True)
    dataset = function(Shard(0, 2, 0))
    assert function.ahead(0, 2, 8) == 4
    assert firsts(dataset, 2) == [1, 17]
    for done, expected in ((2, [17, 1, 17]), (4, [1, 17, 1])):
        following = function.next_pass(done)
        assert following is not None
        assert firsts(following, 3) == expected


@pytest.mark.slow
def test_reading_ahead_ends_with_the_training(monkeypatch):
    opened: list[Any] = []

    def recorded(self, data, **more):
        opened.append(data)
        OPEN(self, data, **more)

    monkeypatch.setattr(MirroredEngine, "open", recorded)
    tfdist.fit(classifier(), batches().filter(lambda *_: True), steps_per_execution=2)
    (data,) = opened
    assert not data._opened
    function = OwnShard(odd)
    list(function(Shard()).take(1))
    (source,) = function._opened
    assert source._batches is not None
    function.close()
    assert source._batches is None


def test_reading_ahead_counts_the_batches_of_all_workers():
    function = OwnShard(odd, readers=2)
    dataset = function(Shard(0, 2, 0))
    assert [function.ahead(done, 2, 8) for done in (0, 2, 4)] == [4, 2, 0]
    assert firsts(dataset, 3) == [1, 17, 1]


@pytest.mark.parametrize(("step", "left"), [(2, 1), (3, 0), (7, 2)])
def test_reading_ahead_after_a_restart(step, left):
    function = OwnShard(odd)
    dataset = function(Shard(step=step))
    assert function.ahead(step, 1, 9) == left
    assert firsts(dataset, 4) == [[1, 9, 17][number % 3] for number in range(step, step + 4)]
