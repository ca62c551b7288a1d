"""Tests of the health check of a container: which processes are checked, and which servers are healthy."""

import socket
import subprocess
import sys
import threading

import pytest

from tfdist_cli.task.health import is_server, main, responds

SETTINGS = b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /venv/bin/tfdist role --task ps:0 --cluster c.yaml", True),
        ("/venv/bin/tfdist role --cluster c.yaml --task worker:1", True),
        ("python -m tfdist_cli role --task=worker:1 --cluster c.yaml", True),
        ("/venv/bin/tfdist role --task data_worker:1 --cluster c.yaml", True),
        ("/venv/bin/tfdist role --task data_dispatcher --cluster c.yaml", True),
        ("/venv/bin/tfdist role --task chief --cluster c.yaml", False),
        ("/venv/bin/tfdist role --task evaluator:0 --cluster c.yaml", False),
        ("/venv/bin/tfdist role --cluster c.yaml", False),
        ("/venv/bin/tfdist launch c.yaml --task ps:0", False),
        ("/venv/bin/tfdist", False),
        ("python train.py role --task ps:0", False),
        ("", False),
    ],
)
def test_which_commands_are_servers(command, expected):
    assert is_server(command.split(), {}) is expected


@pytest.mark.parametrize(
    ("tf_config", "expected"),
    [
        ('{"cluster": {}, "task": {"type": "ps", "index": 0}}', True),
        ('{"cluster": {}, "task": {"type": "chief", "index": 0}}', False),
        ("{", False),
        ("[]", False),
        ("{}", False),
    ],
)
def test_the_role_of_tf_config(tf_config, expected):
    assert is_server(["tfdist", "role"], {"TF_CONFIG": tf_config}) is expected


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def reply(listener, data):
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(data)

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("data", "expected"),
    [(SETTINGS, True), (SETTINGS[:5], False), (b"HTTP/1.1 400 Bad Request\r\n\r\n", False), (b"", False)],
)
def test_a_server_that_responds_is_healthy(listener, data, expected):
    assert responds(reply(listener, data)) is expected


def test_a_server_that_does_not_accept_connections_is_not_healthy(listener, monkeypatch):
    monkeypatch.setattr("tfdist_cli.task.health._TIMEOUT", 0.2)
    port = listener.getsockname()[1]
    assert not responds(port)
    listener.close()
    assert not responds(port)


def test_a_server_that_does_not_respond_is_named(monkeypatch, capsys):
    command = [sys.executable, "-c", "input()", "tfdist", "role", "--task", "ps:0"]
    monkeypatch.setattr("tfdist_cli.task.health.is_server", lambda argv, _: argv == command)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert main() == 1
        assert f"process {process.pid} " in capsys.readouterr().out
        process.communicate(b"\n")
    assert main() == 0
