"""Sources that a process ends, and what a data worker still has."""

import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from tfdist_cli.train.tf_compat.data import register_python
from tfdist_cli.train.tf_compat.data_service import draining
from tfdist_cli.train.tf_compat.data_service.draining import dispatcher_config, ending_on_request, running_tasks

pytestmark = pytest.mark.slow
NAME = "test-draining"
RAGGED = tf.ragged.constant([[1], [2, 3], [4]])
DATASETS = {
    "range": lambda: tf.data.Dataset.range(20),
    "arrays": lambda: tf.data.Dataset.from_tensor_slices((np.arange(20.0), {"a": np.zeros([20, 3], np.float32)})),
    "one": lambda: tf.data.Dataset.from_tensors(7),
    "two sources": lambda: tf.data.Dataset.range(9).concatenate(tf.data.Dataset.range(9)).map(lambda x: x + 1).batch(4),
    "files": lambda: tf.data.Dataset.from_tensor_slices(["a", "b"]).interleave(lambda _: tf.data.Dataset.range(3)),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(RAGGED),
    "sparse": lambda: tf.data.Dataset.from_tensor_slices(RAGGED.to_sparse()),
}


@pytest.fixture
def each(monkeypatch):
    """Lets a source ask before each element, however soon it follows."""
    monkeypatch.setattr(draining, "_ASK_SECONDS", 0.0)


class Asked:
    """The function that a process registers: it ends the sources after some questions."""

    def __init__(self, most=10**9):
        self.count, self.most = 0, most
        register_python(NAME, self.answer)

    def answer(self, _):
        self.count += 1
        return np.array(self.count > self.most)


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_a_dataset_is_the_same_until_it_is_ended(make):
    asked = Asked()
    ending = ending_on_request(make(), NAME)
    assert ending.element_spec == make().element_spec
    for one, other in zip(ending, make(), strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, _dense(one), _dense(other))
    assert asked.count > 0


def test_a_dataset_is_the_same_with_deterministic_operations():
    asked = Asked()
    tf.config.experimental.enable_op_determinism()
    try:
        assert list(map(int, ending_on_request(tf.data.Dataset.range(20), NAME))) == list(range(20))
    finally:
        config.disable_op_determinism()
    assert asked.count > 0


def _dense(element):
    return tf.nest.map_structure(tf.convert_to_tensor, tf.nest.flatten(element, expand_composites=True))


@pytest.mark.usefixtures("each")
def test_what_a_source_has_returned_passes_through_the_pipeline():
    asked = Asked(most=7)
    data = tf.data.Dataset.range(100).map(lambda x: x + 1).shuffle(50, seed=1).batch(4)
    shown = [int(number) for batch in ending_on_request(data, NAME) for number in batch]
    assert sorted(shown) == list(range(1, 8))  # the elements 0 to 6 and no other one
    assert asked.count == 8


@pytest.mark.usefixtures("each")
def test_each_of_two_sources_ends():
    Asked(most=3)
    data = tf.data.Dataset.range(9).concatenate(tf.data.Dataset.range(100, 109))
    assert list(ending_on_request(data, NAME).as_numpy_iterator()) == [0, 1, 2]


def test_cheap_elements_are_not_asked_for_one_by_one():
    asked = Asked()
    assert len(list(ending_on_request(tf.data.Dataset.range(2000), NAME).batch(2000))) == 1
    assert asked.count < 1000


def test_options_stay():
    data = tf.data.Dataset.range(3)
    options = tf.data.Options()
    options.deterministic = False
    assert ending_on_request(data.with_options(options), NAME).options().deterministic is False


def test_parts_of_a_pass_that_nobody_reads_any_more_end():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(dispatcher_config(0, "grpc"))
    worker = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=dispatcher._address,
            protocol="grpc",
            heartbeat_interval_ms=100,
            dispatcher_timeout_ms=1000,
        )
    )
    data = tf.data.Dataset.range(1000).apply(
        service.distribute(service.ShardingPolicy.DYNAMIC, f"grpc://{dispatcher._address}")
    )
    reader = iter(data)
    next(reader)
    assert running_tasks(worker) == 1
    del reader
    deadline = time.monotonic() + 30
    while running_tasks(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for server in (dispatcher, worker):
        server._stop()
