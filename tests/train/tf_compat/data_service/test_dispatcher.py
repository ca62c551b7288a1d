"""The messages of a dispatcher, as a real one sends them."""

import grpc
import pytest
import tensorflow as tf

from tfdist_cli.train.tf_compat.data_service.dispatcher import (
    UPDATE,
    WORKERS,
    address_in,
    completed,
    service_name,
    worker_addresses,
)

pytestmark = pytest.mark.slow


def test_a_name_contains_the_address():
    for address in ("10.0.0.1:2222", "[::1]:5"):
        assert address_in(service_name(address, "abc")) == address
        assert service_name(address, "abc") != service_name(address, "def")


def test_a_dispatcher_lists_workers_by_their_names_and_takes_their_reports():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(protocol="grpc"))
    name = service_name("127.0.0.1:%port%", "one")
    config = service.WorkerConfig(dispatcher_address=dispatcher._address, worker_address=name, protocol="grpc")
    worker = service.WorkerServer(config)
    data = tf.data.Dataset.range(8).apply(
        service.distribute(service.ShardingPolicy.DYNAMIC, f"grpc://{dispatcher._address}")
    )
    assert sorted(data.as_numpy_iterator()) == list(range(8))  # gRPC finds the worker by its name
    with grpc.insecure_channel(dispatcher._address) as channel:
        (found,) = worker_addresses(channel.unary_unary(WORKERS)(b""))
        assert address_in(found) == worker._address.replace("localhost", "127.0.0.1")
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(UPDATE)(completed(found, [123456]))
    assert "123456" in caught.value.details()  # it has read the number
    for server in (dispatcher, worker):
        server._stop()
