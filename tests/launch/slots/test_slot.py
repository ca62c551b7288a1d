"""A slot whose agent fails."""

import socket
from contextlib import contextmanager

import pytest

from tfdist_cli.launch.slots import slot
from tfdist_cli.launch.slots.driver_errors import missing_package
from tfdist_cli.launch.slots.handshake import Caller


def test_the_error_of_an_agent_has_the_package_that_it_lacks(monkeypatch, capsys):
    @contextmanager
    def connected(*_):
        one, other = socket.socketpair()
        with one, other:
            yield one

    monkeypatch.setattr(slot, "connect", connected)
    monkeypatch.setattr(slot, "AGENT", "no_such_package.agent")
    with pytest.raises(RuntimeError) as raised:
        slot.run_agent(("127.0.0.1", 1), "secret", Caller(3, "127.0.0.1"))
    assert missing_package(str(raised.value), "here", "install it").code == "tfdist-missing"
    assert "no_such_package" in str(raised.value)
    assert "no_such_package" in capsys.readouterr().err
