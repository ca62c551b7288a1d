"""Workers divide one order of a dataset, wherever it was made."""

import keras
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.inputs import as_dataset_function
from tfdist_cli.train.data.pipeline import repeated
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.data.sharding import existing_dataset
from tfdist_cli.train.data.sharding.existing_dataset import DatasetShards, make_older_datasets_again

SHUFFLED = tf.data.Dataset.range(12).shuffle(12)
DRAWN = tf.data.Dataset.range(4).flat_map(lambda _: tf.data.Dataset.range(3).shuffle(3))
"""Made here, before a test sets the seed of the process."""


def test_a_dataset_of_batches_is_divided_by_batches():
    data = tf.data.Dataset.range(10).batch(2)
    parts = [[list(map(int, batch)) for batch in as_dataset_function(data)(Shard(n, 2, n))] for n in range(2)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("shuffled", [SHUFFLED, SHUFFLED.shuffle(5), SHUFFLED.map(abs).prefetch(1)])
def test_workers_divide_one_order_of_a_dataset_that_is_shuffled_without_a_seed(shuffled):
    readers = [iter(repeated(DatasetShards(shuffled.batch(2)))(Shard(index, 2))) for index in range(2)]
    passes = [[int(each) for reader in readers for _ in range(3) for each in next(reader)] for _ in range(3)]
    assert [sorted(one) for one in passes] == [list(range(12))] * 3
    assert passes[0] != passes[1] != passes[2]


def test_a_dataset_that_is_shuffled_with_a_seed_keeps_its_order():
    tasks = [tf.data.Dataset.range(12).shuffle(12, seed=3) for _ in range(3)]  # a copy in each process
    both = zip(*(DatasetShards(task)(Shard(index, 2)) for index, task in enumerate(tasks[:2])), strict=True)
    assert [int(each) for pair in both for each in pair] == [int(each) for each in tasks[2]]


SEEDED = tf.data.Dataset.range(12).shuffle(12, seed=3)


@pytest.mark.parametrize("shuffled", [SHUFFLED, SEEDED, SEEDED.shuffle(5, seed=3).repeat()])
@pytest.mark.parametrize("on_workers", [True, False], ids=["parameter servers", "mirrored"])
def test_each_worker_that_reads_all_of_a_dataset_has_an_order_of_its_own(shuffled, on_workers, monkeypatch):
    """The same one when it is started again."""
    if on_workers:
        monkeypatch.setattr(existing_dataset, "_device_of_remote_call", lambda: existing_dataset._HERE)
    shares = [Shard(0, 1, worker) for worker in range(3)]
    first, again = ([[int(each) for each in DatasetShards(shuffled)(share).take(12)] for share in shares] for _ in "12")
    assert sorted(first[0]) == list(range(12)) or shuffled not in (SHUFFLED, SEEDED)
    assert len(set(map(tuple, first))) == 3
    if on_workers or shuffled is not SHUFFLED:
        assert first[1:] == again[1:]


def test_the_global_seed_does_not_give_all_workers_one_order():
    orders = set()
    for worker in range(3):  # each in a process of its own
        keras.utils.set_random_seed(1)
        shuffled = tf.data.Dataset.range(12).shuffle(12)
        orders.add(tuple(map(int, DatasetShards(shuffled)(Shard(0, 1, worker)))))
    assert len(orders) == 3


def test_a_copy_that_cannot_be_made_again_keeps_its_order(monkeypatch, caplog):
    def fails(*_):
        raise tf.errors.FailedPreconditionError(None, None, "Trying to access resource 14 located in another device")

    monkeypatch.setattr(existing_dataset, "recreated_on", fails)
    shuffled = tf.data.Dataset.range(12).shuffle(12, seed=1, reshuffle_each_iteration=False)
    first, second = ([*map(int, DatasetShards(shuffled)(Shard(0, 1, worker)))] for worker in (0, 1))
    assert first == second
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_order_that_is_drawn_in_a_function_cannot_be_divided():
    with raises(TrainingError, "order-drawn-in-function"):
        DatasetShards(DRAWN)(Shard(0, 2))
    assert sorted(map(int, DatasetShards(DRAWN)(Shard()))) == sorted([0, 1, 2] * 4)


def test_an_order_that_cannot_be_the_same_on_all_workers(monkeypatch):
    def fails(*_):
        raise tf.errors.FailedPreconditionError(None, None, "Trying to access resource 14 located in another device")

    monkeypatch.setattr(existing_dataset, "recreated_on", fails)
    with raises(TrainingError, "table-in-dataset"):
        DatasetShards(SHUFFLED)(Shard(0, 2))
    assert DatasetShards(SHUFFLED)(Shard(0, 1)).cardinality() == 12


def test_a_dataset_with_a_table_of_another_place_cannot_be_made_again(monkeypatch):
    def fails(*_):
        raise tf.errors.FailedPreconditionError(None, None, "Trying to access resource 14 located in another device")

    makes = []
    monkeypatch.setattr(existing_dataset, "recreated_on", fails)
    monkeypatch.setattr(existing_dataset, "replace_older_datasets", makes.append)
    make_older_datasets_again()
    with raises(TrainingError, "table-in-dataset"):
        makes[0](tf.data.Dataset.range(1))
