"""Only who knows the run's secret is taken for a slot."""

import socket
import threading

import pytest

from tfdist_cli.launch.slots.handshake import Caller, accept, connect


@pytest.mark.parametrize(("secret", "accepted"), [("right", Caller(1, "host-b")), ("wrong", None)])
def test_the_secret_is_compared(secret, accepted):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = threading.Thread(
            target=lambda: connect(listener.getsockname(), secret, Caller(1, "host-b")).close(), daemon=True
        )
        calling.start()
        connection, _ = listener.accept()
        with connection:
            assert accept(connection, "right") == accepted
            noticed = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert noticed == (15_000 if accepted else 0)
        calling.join()


@pytest.mark.parametrize("answer", [b"\n", b"[]\n", b"{}\n", b'{"slot": "x", "host": 1, "proof": 2}\n', b"x" * 5000])
def test_other_answers_are_refused(answer):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(answer)
        assert accept(here, "right") is None
