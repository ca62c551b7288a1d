"""The scope to make a model in."""

import re
import signal
import socket
import threading
import time
from dataclasses import replace

import keras
import numpy as np
import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.ports import free_address
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import join, membership
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.cluster.tensorflow_setup import communication_options
from tfdist_cli.train.variables.sharding import parts


def test_a_program_says_where_its_variables_go(servers, monkeypatch):
    strategy = servers(3)
    monkeypatch.setattr(join, "_joined", ClusterContext(Environment.read(), strategy, placement=strategy.placement))
    assert tfdist.is_chief()
    with tfdist.scope(placement="round_robin", shard=ShardRule(min_bytes=40, max_shards=2)):
        spread = keras.Variable("zeros", shape=(10, 1))
        keras.Variable("zeros", shape=(9, 1))
    assert [tuple(part.shape) for part in parts(spread)] == [(5, 1), (5, 1)]
    assert strategy.placement.bytes == [20, 20, 36]
    with raises(TrainingError, "placement-changed") as caught:
        tfdist.scope()
    assert re.search(r"placement='round_robin', .*max_shards=2", caught.value.message)
    with tfdist.scope(placement="round_robin", shard=ShardRule(min_bytes=40, max_shards=2)):
        pass


def test_where_there_are_no_ps_it_says_nothing():
    with tfdist.scope(placement="round_robin", shard=None):
        pass
    with tfdist.scope():
        pass


@pytest.mark.parametrize(("key", "value"), [("stages", 2), ("place", {"*": "worker:0"}), ("balance", "time")])
def test_layers_of_another_strategy_are_not_placed_and_it_says_so(key, value, log):
    with tfdist.scope(**{key: value}):
        pass
    assert [line.partition(" ")[0] for line in log] == [key]


def test_a_place_divides_the_layers_by_itself():
    with raises(UsageError, "stages-and-place"):
        tfdist.scope(place={"*": "worker:0"}, balance="time")


def test_no_such_placement():
    with raises(UsageError, "unknown-balance"):
        tfdist.scope(balance="flops")
    with raises(UsageError, "unknown-placement") as raised:
        tfdist.scope(placement="nearest")
    assert "'nearest'" in raised.value.message
    assert raised.value.hint.endswith("greedy or round_robin")


@pytest.mark.parametrize(
    ("updates", "ignored"),
    [
        ({"push_every": 2}, True),
        ({"mode": "sync", "batch": "proportional"}, True),
        ({"mode": "sync"}, False),  # one process is synchronous
        ({}, False),
    ],
)
def test_rules_for_parameter_servers_are_left_out_elsewhere_with_a_word(updates, ignored, monkeypatch):
    told = []
    monkeypatch.setattr("tfdist_cli.train.engine.select.log.info", lambda text, *args: told.append(text % args))
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tfdist.fit(model, (np.zeros([4, 2]), np.zeros([4, 1])), updates=tfdist.Updates(**updates))
    assert any(line.startswith("updates is ignored:") and line.endswith(" single") for line in told) == ignored


@pytest.mark.parametrize("wanted", ["ring", "nccl"])
def test_the_wanted_communication_is_tensorflows_and_no_direct_all_reduce(wanted):
    assert communication_options(wanted).implementation.name == wanted.upper()
    two = {TaskId("worker", index): Address("127.0.0.1", 2222 + index) for index in range(2)}
    environment = Environment("multi_worker_mirrored", TaskId("worker", 0), two)
    assert set(join._all_reduce_group(environment)) == set(two)
    assert not join._all_reduce_group(replace(environment, communication=wanted))


class Ended(Exception):
    """The process would have been ended by SIGTERM."""


@pytest.mark.parametrize("chief_is_there", [True, False])
def test_a_worker_asks_to_leave_only_if_there_is_a_chief(chief_is_there, monkeypatch, log):
    def interrupted(*_):
        raise membership.SigtermReceived

    def end(_):
        raise Ended

    monkeypatch.setattr(join, "wait_until_exited", interrupted)
    monkeypatch.setattr(membership, "end_by_sigterm", end)
    worker, chief = TaskId("worker", 0), TaskId("chief", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = Address("127.0.0.1", listening.getsockname()[1])
        addresses = {chief: there if chief_is_there else free_address(), worker: free_address()}
        environment = Environment("parameter_server", worker, addresses, join_address=free_address())
        with pytest.raises(Ended):
            join._wait_for_chief(environment)
    assert len(log) == chief_is_there


def test_a_task_leaves_although_another_thread_received_the_signal(monkeypatch, log):
    def wait(*_):
        threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        one, other = socket.socketpair()
        with one, other:
            one.settimeout(10)
            one.recv(1)

    def end(_):
        raise Ended

    monkeypatch.setattr(join, "wait_until_exited", wait)
    monkeypatch.setattr(membership, "end_by_sigterm", end)
    worker, chief = TaskId("worker", 0), TaskId("chief", 0)
    addresses = {chief: free_address(), worker: free_address()}
    environment = Environment("parameter_server", worker, addresses, join_address=free_address())
    began = time.monotonic()
    with pytest.raises(Ended):
        join._wait_for_chief(environment)
    assert time.monotonic() - began < 5
    assert log == []
