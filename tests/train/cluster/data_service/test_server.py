"""A data worker leaves when all that it has taken is read, or when nobody reads it any more."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.ports import free_address
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import membership
from tfdist_cli.train.cluster.data_service import server
from tfdist_cli.train.cluster.membership import LEAVE, LEFT

TASK = TaskId("data_worker", 1)


class DataWorker:
    """TensorFlow's server, which has a part of a pass until it is read."""

    def __init__(self):
        self.asked, self.read = threading.Event(), threading.Event()

    def _num_tasks(self):
        self.asked.set()
        return int(not self.read.is_set())


@pytest.fixture
def worker(monkeypatch):
    made = DataWorker()
    monkeypatch.setattr(server, "_kept", [made])
    monkeypatch.setattr(server, "_leaving", threading.Event())
    return made


@pytest.fixture
def asked(monkeypatch):
    """What the data worker asks; the chief agrees."""
    found: list[str] = []

    def leave(*_, asks=LEAVE):
        found.append(asks)
        return True

    monkeypatch.setattr(membership, "leave", leave)
    return found


@pytest.fixture
def chief():
    """A listening port, and a function that accepts a connection there as TensorFlow's server does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            connection = listening.accept()[0]
            connection.sendall(b"\0\0\0\4\0\0\0\0\0")
            return connection

        yield listening, accept


def leaving(pool, chief):
    address = Address("127.0.0.1", chief.getsockname()[1])
    return pool.submit(server.leave, TASK, free_address(), free_address(), chief=address)


def test_a_data_worker_leaves_when_its_examples_are_read(worker, asked, chief):
    listening, accept = chief
    with ThreadPoolExecutor() as pool:
        left = leaving(pool, listening)
        with accept():
            assert not left.done()
            assert asked == [LEAVE]
            worker.read.set()
            assert left.result(timeout=10)
    assert asked == [LEAVE, LEFT]
    assert server._leaving.is_set()


def test_a_data_worker_does_not_wait_for_a_chief_that_has_exited(worker, asked, chief):
    """Its dispatcher may have exited, too: then it never learns that its examples are read."""
    listening, accept = chief
    with ThreadPoolExecutor() as pool:
        left = leaving(pool, listening)
        with accept():
            assert not left.done()
            listening.close()
        assert left.result(timeout=10) is False
    assert worker.asked.is_set()
    assert asked == [LEAVE]


def test_a_data_worker_that_has_nothing_asks_no_chief(worker, asked):
    worker.read.set()
    assert server.leave(TASK, free_address(), free_address(), chief=free_address())
    assert asked == [LEAVE, LEFT]
