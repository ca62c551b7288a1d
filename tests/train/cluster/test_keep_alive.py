"""Connections between tasks give up a dead link."""

import socket
import sys

import pytest

from tfdist_cli.train.cluster.keep_alive import PATIENCE, set_timeouts

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lists connections in /proc")


@pytest.fixture
def pair():
    """Both ends of a connection, and the socket that listened for it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        yield listener, near, far


def is_bounded(connection):
    timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert timeout in (0, PATIENCE * 1000)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == bool(timeout)
    return bool(timeout)


def test_both_ends_of_a_tasks_connections_are_bounded(pair):
    listener, near, far = pair
    set_timeouts({listener.getsockname()[1]}, set())
    assert is_bounded(near)
    assert is_bounded(far)
    near.sendall(b"still open")
    assert far.recv(100) == b"still open"


def test_other_connections_are_left_as_they_are(pair):
    _, near, far = pair
    set_timeouts({1}, set())
    assert not is_bounded(near)
    assert not is_bounded(far)


def test_each_connection_is_looked_at_once_and_a_new_one_in_its_turn(pair):
    listener, near, _ = pair
    ports = {listener.getsockname()[1]}
    with socket.socket() as later:
        known = set_timeouts(ports, set())
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
        later.connect(listener.getsockname())
        known = set_timeouts(ports, known)
        assert is_bounded(later)
        assert not is_bounded(near)
    assert len(set_timeouts(ports, known)) == len(known) - 1
