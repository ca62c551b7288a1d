"""A dispatcher without the data workers that have left."""

import time
from collections import Counter

import pytest
import tensorflow as tf

from tfdist_cli.spec.address import Address
from tfdist_cli.train.cluster.data_service.members import _Filter
from tfdist_cli.train.cluster.data_service.reader import DataService
from tfdist_cli.train.data.pipeline import Pipeline
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.tf_compat.data_service.dispatcher import service_name

pytestmark = pytest.mark.slow
COUNT, SIZE = 64, 4


@pytest.fixture
def servers():
    """A dispatcher, and two data workers; the second one is stopped by the test."""
    module = tf.data.experimental.service
    dispatcher = module.DispatchServer(module.DispatcherConfig(protocol="grpc"))
    workers = [
        module.WorkerServer(
            module.WorkerConfig(
                dispatcher_address=dispatcher._address,
                worker_address=service_name("127.0.0.1:%port%", str(number)),
                protocol="grpc",
                heartbeat_interval_ms=100,
                dispatcher_timeout_ms=1000,  # a worker that waits for a dispatcher cannot be stopped
            )
        )
        for number in range(2)
    ]
    yield dispatcher, workers
    dispatcher._stop()
    workers[0]._stop()


def lost(error):
    pass


def test_passes_after_a_data_worker_has_left_have_each_example_once_and_do_not_wait_for_it(servers):
    dispatcher, (_, leaving) = servers
    between = _Filter(dispatcher._address.replace("localhost", "127.0.0.1"), lost)
    service = DataService(between.address, workers=2)
    data = service.batches(lambda shard: tf.data.Dataset.range(COUNT).map(lambda x: x + 0), Pipeline(SIZE, 0))(Shard())
    batches = data.as_numpy_iterator()
    first = [int(number) for _ in range(COUNT // SIZE) for number in next(batches)]
    assert sorted(first) == list(range(COUNT))
    between.remove(Address.parse(leaving._address.replace("localhost", "127.0.0.1")))
    time.sleep(0.5)  # the reader has begun the second pass, which both prepare
    second = [int(number) for _ in range(COUNT // SIZE) for number in next(batches)]
    assert sorted(second) == list(range(COUNT))
    leaving._stop()
    started = time.monotonic()
    for _ in range(3):
        shown = Counter(int(number) for _ in range(COUNT // SIZE) for number in next(batches))
        assert shown == Counter(range(COUNT))
    assert time.monotonic() - started < 20
    between._process.kill()
