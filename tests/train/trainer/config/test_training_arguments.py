"""The length of an epoch, and the data that each worker sees."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.python_data import Rows
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.cluster.membership import Membership
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.length import count, with_length
from tfdist_cli.train.data.python_data.read_ahead import OwnShard
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.trainer.config.data_length import steps_of_one_pass, worker_shards
from tfdist_cli.train.trainer.config.training import OPEN_END
from tfdist_cli.train.trainer.config.training_arguments import TrainingArguments


def context(strategy, replicas=1, **tasks):
    """Returns this process, the first task, in a cluster of some tasks of each role."""
    every = [TaskId(role, index) for role, count in tasks.items() for index in range(count)]
    addresses = {task: Address("localhost", 2222 + number) for number, task in enumerate(every)}
    environment = Environment(strategy=strategy, task=every[0], addresses=addresses)
    return ClusterContext(environment, SimpleNamespace(num_replicas_in_sync=replicas))


ASYNC = context("parameter_server", chief=1, ps=1, worker=3)
MIRRORED = context("multi_worker_mirrored", replicas=3, chief=1, worker=2)
GPUS = context("mirrored", replicas=2, chief=1)


def batches(count):
    """Returns a function that maps a shard to its part of `count` batches."""
    return lambda shard: tf.data.Dataset.range(count).shard(shard.count, shard.index)


class Source:
    """A `DataSource` of batches that records how it is asked."""

    def __init__(self, function, *, has_batches=True):
        self.function, self.repeat, self.has_batches = function, None, has_batches

    def one_pass(self):
        return self.function

    def elements(self):
        return self.function

    def with_lengths(self, lengths):
        return Source(with_length(self.function, lengths))

    def batches(self, *, repeat):
        self.repeat = repeat
        return self.function

    def served_batches(self, service, *, repeat):
        raise AssertionError("the cluster has no data workers")


@pytest.mark.parametrize(("aggregate", "skips"), [(None, False), (2, True)])
def test_backup_workers_skip_batches_of_the_chief_that_are_let_go_of(aggregate, skips):
    data = Inputs.of(Rows(np.zeros([24, 1]))).dataset_function(None, shuffle=False)
    updates = tfdist.Updates(mode="sync", aggregate=aggregate)
    config: Any = TrainingArguments(epochs=1, updates=updates).configure(ASYNC, Source(data), None)
    assert config.data.source.skips is skips


@pytest.mark.parametrize("cluster", [ASYNC, MIRRORED], ids=["async", "mirrored"])
def test_each_worker_has_its_shard(cluster):
    assert worker_shards(cluster, "split") == [Shard(0, 3, 0), Shard(1, 3, 1), Shard(2, 3, 2)]
    assert worker_shards(cluster, "copy") == [Shard(0, 1, 0), Shard(0, 1, 1), Shard(0, 1, 2)]
    assert worker_shards(cluster, "service") == [Shard()]


def test_workers_that_have_joined_or_left_since_the_start_count_in_the_next_training():
    membership = Membership({TaskId("worker", index): Address("localhost", 2300 + index) for index in (1, 2, 4, 5)}, 8)
    cluster = replace(ASYNC, joins=SimpleNamespace(membership=membership))
    assert worker_shards(cluster, "split") == [Shard(place, 4, place) for place in range(4)]
    assert steps_of_one_pass(cluster, batches(13), Rules(tfdist.Updates(mode="sync")), "split") == 3
    assert steps_of_one_pass(cluster, batches(13), Rules(), "copy") == 4 * 13
    assert len(worker_shards(cluster, "split", 2)) == 2


@pytest.mark.parametrize(
    ("cluster", "mode", "share", "steps"),
    [
        (ASYNC, "async", "split", 13),
        (ASYNC, "async", "copy", 39),
        (ASYNC, "async", "service", 13),
        (ASYNC, "sync", "split", 4),  # the shortest shard has 4 of the 13 batches
        (ASYNC, "sync", "service", 4),
        (MIRRORED, "async", "split", 4),
        (MIRRORED, "async", "copy", 13),
        (GPUS, "async", "split", 6),
    ],
)
def test_steps_of_one_pass(cluster, mode, share, steps):
    rules = Rules(tfdist.Updates(mode=mode))
    assert steps_of_one_pass(cluster, batches(13), rules, share) == steps


def test_data_that_has_no_steps():
    with raises(TrainingError, "no-full-batch"):
        steps_of_one_pass(MIRRORED, batches(2), Rules(), "split")
    with raises(TrainingError, "unknown-data-length"):
        steps_of_one_pass(MIRRORED, lambda shard: batches(9)(shard).repeat(), Rules(), "split")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4, None, True)),
        ({"steps_per_epoch": 7}, (7, 4, True)),
        ({"steps_per_epoch": 7, "repeat": True}, (7, None, True)),
        ({"steps_per_epoch": 7, "repeat": False}, (7, None, False)),
    ],
)
def test_data_of_known_length_repeats(given, expected):
    source = Source(batches(13))
    config = TrainingArguments(**given).configure(MIRRORED, source, None)
    assert (config.steps_per_epoch, config.steps_per_pass, source.repeat) == expected
    assert config.rules == Rules()
    assert config.checkpoints is None


def odd(count):
    """Returns a function like `batches`, with half of the batches and of unknown length."""
    return lambda shard: tf.data.Dataset.range(count).filter(lambda n: n % 2 == 1).shard(shard.count, shard.index)


@pytest.mark.parametrize("cluster", [MIRRORED, GPUS], ids=["mirrored", "GPUs"])
def test_data_of_unknown_length_is_read_ahead_where_a_process_reads_it(cluster):
    config = TrainingArguments(epochs=3).configure(cluster, Source(odd(26)), None)
    assert (config.finds_end, config.counting, config.steps_per_epoch) == (True, None, OPEN_END)
    within = TrainingArguments(steps_per_epoch=5, epochs=3).configure(cluster, Source(odd(26)), None)
    assert (within.finds_end, within.steps_per_epoch, within.steps_per_pass) == (True, 5, None)
    found = within.with_pass(4)
    assert (found.finds_end, found.steps_per_epoch, found.steps_per_pass) == (False, 5, 4)
    assert config.with_pass(4).last_step() == 12


@pytest.mark.parametrize(
    ("cluster", "mode", "share", "steps"),
    [(ASYNC, "async", "split", 13), (ASYNC, "sync", "split", 4), (ASYNC, "async", "copy", 39)],
)
def test_data_of_unknown_length_is_counted_where_others_read_it(cluster, mode, share, steps):
    arguments = TrainingArguments(updates=tfdist.Updates(mode=mode), share=share, epochs=2)
    counting = arguments.configure(cluster, Source(odd(26)), None).counting
    lengths = [count(counting.data, shard) for shard in counting.shards]
    assert lengths == ([13] if share == "copy" else [5, 4, 4])
    config = counting.configured(lengths)
    assert (config.steps_per_epoch, config.finds_end, config.lengths) == (steps, False, tuple(lengths))
    assert config.last_step() == 2 * steps


def test_examples_are_counted_before_they_are_shuffled():
    config = TrainingArguments().configure(MIRRORED, Source(odd(26), has_batches=False), None)
    assert config.counting
    assert not config.finds_end


def test_each_reader_of_whole_batches_reads_ahead_of_all():
    proportional = TrainingArguments(updates=tfdist.Updates(mode="sync", batch="proportional"))
    for arguments, readers in ((proportional, 1), (TrainingArguments(share="copy"), 3)):
        data = arguments.configure(MIRRORED, Source(odd(26)), None).data
        assert isinstance(data, OwnShard)
        assert data.readers == readers


@pytest.mark.parametrize("cluster", [ASYNC, MIRRORED], ids=["async", "mirrored"])
def test_data_that_never_ends_is_an_error(cluster):
    with raises(TrainingError, "endless-epoch"):
        TrainingArguments().configure(cluster, Source(lambda shard: odd(26)(shard).repeat()), None)


def test_data_workers_that_do_not_exist():
    with raises(UsageError, "no-data-workers"):
        TrainingArguments(share="service", steps_per_epoch=1).configure(MIRRORED, Source(batches(13)), None)


@pytest.mark.parametrize("share", ["copy", "service"])
def test_batches_by_speed_need_data_that_is_divided(share):
    with raises(UsageError, "batch-needs-split"):
        TrainingArguments(share=share, updates=tfdist.Updates(mode="sync", batch="proportional"))
