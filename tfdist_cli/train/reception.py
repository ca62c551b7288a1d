"""How tasks say who they are to whom they connect, and how these ask them: a line each way.

The one that listens speaks first, so that whoever connects knows whether it is one of tfdist's.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.reach import CONNECT

GREETING = b"tfdist\n"
"""What the one that listens says."""
_LONGEST = 4096
"""Bytes of a line; nobody of ours says so much."""
_VERSIONED = ("tensorflow", "tensorflow-cpu")


@dataclass(frozen=True)
class Hello:
    """What a task says of itself.

    Args:
        task: its name.
        sums: whether it has a circle to sum up with.
    """

    task: TaskId
    sums: bool


class Reception:
    """Asks whoever connects who they are, all at the same time: one that says nothing keeps nobody waiting.

    Args:
        listener: where they connect.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._asked: dict[socket.socket, tuple[bytes, float]] = {}
        """Those that have not said it yet: what they have said, and until when they may."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Lets those go that have not said who they are."""
        for connection in list(self._asked):
            self._let_go(connection)
        self._selector.close()

    def arrived(self, seconds: float) -> list[tuple[socket.socket, Hello]]:
        """The connections of those that have said who they are by now, or do so in a moment.

        Raises:
            TrainingError: one has another version of TensorFlow.
        """
        found = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._ask()
            elif (hello := self._heard(connection := cast("socket.socket", key.fileobj))) is not None:
                found.append((connection, hello))
        for connection, (_, until) in list(self._asked.items()):
            if time.monotonic() > until:
                self._let_go(connection)
        return found

    def _ask(self) -> None:
        with suppress(OSError), ExitStack() as stranger:  # it may have gone again
            connection = stranger.enter_context(self._listener.accept()[0])
            connection.setblocking(False)
            connection.send(GREETING)
            self._selector.register(connection, selectors.EVENT_READ)
            self._asked[connection] = b"", time.monotonic() + CONNECT
            stranger.pop_all()

    def _heard(self, connection: socket.socket) -> Hello | None:
        """Who a connection says it is; None while it has not said all, or when it is nobody of ours."""
        said, until = self._asked[connection]
        try:
            more = connection.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        said += more
        if more and not said.endswith(b"\n") and len(said) < _LONGEST:
            self._asked[connection] = said, until
            return None
        try:
            content = json.loads(said)
            hello, theirs = Hello(TaskId.parse(content["task"]), bool(content.get("sums"))), content["tensorflow"]
        except (ValueError, KeyError, TypeError):
            self._let_go(connection)  # a port scanner, perhaps, or somebody who has gone again
            return None
        _check_version(hello.task, theirs)
        self._selector.unregister(connection)
        del self._asked[connection]
        connection.setblocking(True)
        keep_alive(connection)
        return hello

    def _let_go(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._asked[connection]
        connection.close()


def hello_of(task: TaskId, *, sums: bool = False) -> bytes:
    """What a task says of itself; `sums` as in `Hello`."""
    return json.dumps({"task": str(task), "tensorflow": _tensorflow(), "sums": sums}).encode() + b"\n"


def line_of(connection: socket.socket) -> bytes:
    """The next line that comes; less of it where the connection ends."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST:
        more = connection.recv(_LONGEST)
        if not more:
            break
        received += more
    return received


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel notice within half a minute when the other side is no more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has only some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_version(task: TaskId, theirs: str) -> None:
    ours = _tensorflow()
    if theirs != ours:
        raise TrainingError(
            f"{task} has TensorFlow {theirs}, and the chief has {ours}",
            hint="install the same version of TensorFlow on every host",
        )


def _tensorflow() -> str:
    for name in _VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"
