"""The handshake by which a task identifies itself to the task that it connects to: one line in each direction.

The listening task sends first, so that the other one knows that it is a task of tfdist: `tfdist NONCE`. The connecting
task answers `PROOF {json}`. The proof is HMAC-SHA256 of the nonce and the JSON, and its key is the run's secret, which
the launcher passes to each task (`TFDIST_RUN_SECRET`). Tasks that were started by hand may have no secret: then the
proof shows only that they use this protocol.

Any program that reaches the port may connect and send anything. The listening task rejects what is not a task of its
run, logs one warning, and continues.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.reachability import CONNECT

GREETING = b"tfdist "
"""How the first line of the listening task starts; a nonce follows."""
REJECTED = b"no "
"""How the answer to a rejected task starts; the reason follows."""
LATER = b"later\n"
"""The answer to a task that may connect when the tasks of the start are there."""
_LONGEST = 4096
"""The longest line in bytes; the lines of tasks are shorter."""
PERIOD = 1.0
"""The most seconds that are counted between two iterations, so that a pause of the whole machine does not use up the
others' time."""
_MOST_PENDING = 256
"""The largest number of connections without a completed handshake; for a further one, the oldest is rejected."""
_NONCE = re.compile(rb"tfdist ([0-9a-f]{32})\n")
_VERSIONED = ("tensorflow", "tensorflow-cpu")
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Hello:
    """The identity that a task sends.

    Args:
        task: the task.
        sums: whether it takes part in an all-reduce group.
        tensorflow: its version of TensorFlow.
        asks: what it asks of a chief that trains, see `membership`; empty for nothing.
        address: its address; empty unless it asks.
    """

    task: TaskId
    sums: bool
    tensorflow: str
    asks: str = ""
    address: str = ""

    @classmethod
    def read(cls, text: bytes) -> Hello:
        """Parses the JSON.

        Raises:
            ValueError: it has another form.
        """
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        match content:
            case {"task": str(task), "tensorflow": str(tensorflow), "sums": bool(sums), **others}:
                asks, address = others.get("asks", ""), others.get("address", "")
                if isinstance(asks, str) and isinstance(address, str):
                    return cls(TaskId.parse(task), sums, tensorflow, asks, address)
        raise ValueError("it has not the form that tasks send")


class HandshakeListener:
    """Runs the handshakes of all connecting tasks concurrently, so that a silent connection does not block the others.

    Args:
        listener: the listening socket.
        expected: the tasks that may connect; others are rejected.
        later: tasks that may connect another time.

    Attributes:
        rejected: expected tasks that were rejected, and why.
    """

    def __init__(self, listener: socket.socket, expected: Container[TaskId], later: Collection[TaskId] = ()) -> None:
        listener.setblocking(False)
        self.rejected: dict[TaskId, str] = {}
        self._expected, self._later = expected, later
        self._listener = listener
        self._pending: dict[socket.socket, _PendingConnection] = {}
        """The connections whose handshake is not complete."""
        self._looked_at = time.monotonic()
        self._warned = False
        """Whether the warning about rejected connections was logged."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Closes the connections whose handshake is not complete."""
        for connection in list(self._pending):
            self._forget(connection)
            connection.close()
        self._selector.close()

    def identified(self, seconds: float) -> list[tuple[socket.socket, Hello]]:
        """Returns the connections whose handshake completes within `seconds`, each with the task's identity."""
        found = []
        for key, _ in self._selector.select(seconds):
            connection = cast("socket.socket", key.fileobj)
            if connection is self._listener:
                self._accept()
            elif connection in self._pending and (hello := self._receive(connection)) is not None:
                found.append((connection, hello))
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, PERIOD), now
        for connection, pending in list(self._pending.items()):
            pending.seconds_left -= passed
            if pending.seconds_left < 0:
                self._reject(connection, pending, "it did not identify itself in time")
        return found

    def _accept(self) -> None:
        if len(self._pending) >= _MOST_PENDING:
            oldest = next(iter(self._pending))
            self._reject(oldest, self._pending[oldest], "too many others connected")
        with suppress(OSError), ExitStack() as stranger:  # it may be closed already
            connection, address = self._listener.accept()
            stranger.enter_context(connection)
            connection.setblocking(False)
            nonce = secrets.token_hex(16).encode()
            connection.send(GREETING + nonce + b"\n")
            self._selector.register(connection, selectors.EVENT_READ)
            self._pending[connection] = _PendingConnection(nonce, str(address[0]).removeprefix("::ffff:"), CONNECT)
            stranger.pop_all()

    def _receive(self, connection: socket.socket) -> Hello | None:
        """Reads from a connection; returns the task's identity, or None if it is incomplete or rejected."""
        pending = self._pending[connection]
        try:
            more = connection.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        pending.received += more
        if more and not pending.received.endswith(b"\n") and len(pending.received) < _LONGEST:
            return None
        try:
            hello = self._verified(pending)
        except ValueError as error:
            self._reject(connection, pending, str(error))
            return None
        self._forget(connection)
        if hello.task not in self._expected and hello.task in self._later:
            with suppress(OSError):  # it is closed already
                connection.send(LATER)
            connection.close()
            return None
        connection.setblocking(True)
        enable_keepalive(connection)
        return hello

    def _verified(self, pending: _PendingConnection) -> Hello:
        """Verifies and parses what a connection sent.

        Raises:
            ValueError: it is not a task of this run, or one that must not take part.
        """
        proof, _, text = pending.received.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, _proof(pending.nonce, text)):
            raise ValueError(f"it did not prove that it has the run's secret ({RUN_SECRET})")
        hello = Hello.read(text)
        known = hello.task in self._expected or hello.task in self._later
        if not known and hello.task.traits.listens:
            raise ValueError(f"{hello.task} is not expected")
        if hello.tensorflow != (ours := _tensorflow()):
            reason = f"it has TensorFlow {hello.tensorflow[:40]!a}, and the chief has {ours!r}"
            self.rejected[hello.task] = reason
            raise ValueError(reason)
        self.rejected.pop(hello.task, None)
        return hello

    def _reject(self, connection: socket.socket, pending: _PendingConnection, reason: str) -> None:
        """Closes a connection. One that sent nothing only probed whether the port is open, as tasks do."""
        self._forget(connection)
        if pending.received:
            with suppress(OSError):  # it is closed already
                connection.send(REJECTED + reason.encode() + b"\n")
            if not self._warned:
                self._warned = True
                log.warning(
                    "a connection from %s was rejected: %s; further rejections are not logged",
                    pending.host,
                    reason,
                )
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]


@dataclass
class _PendingConnection:
    """A connection whose handshake is not complete.

    Args:
        nonce: the nonce that was sent to it.
        host: the host that it comes from.
        seconds_left: the time that it has left for the handshake.
        received: the bytes that arrived so far.
    """

    nonce: bytes
    host: str
    seconds_left: float
    received: bytes = b""


def hello_message(task: TaskId, greeting: bytes, *, sums: bool = False, asks: str = "", address: str = "") -> bytes:
    """Returns the line by which a task identifies itself to the sender of `greeting`; the rest as in `Hello`."""
    content = {"task": str(task), "tensorflow": _tensorflow(), "sums": sums}
    text = json.dumps(content | ({"asks": asks, "address": address} if asks else {})).encode()
    pending = _NONCE.fullmatch(greeting)
    return _proof(pending[1] if pending else b"", text) + b" " + text + b"\n"


def is_greeting(greeting: bytes) -> bool:
    """Whether a first line is that of a task of tfdist."""
    return bool(_NONCE.fullmatch(greeting))


def receive_greeting(connection: socket.socket) -> bytes:
    """Receives the first line of a task of tfdist, or the first bytes of any other server."""
    received = connection.recv(_LONGEST)
    while _begins(received) and (more := connection.recv(_LONGEST)):
        received += more
    return received


def _begins(received: bytes) -> bool:
    """Whether these bytes may be the start of a greeting that is not complete."""
    likely = GREETING.startswith(received) or received.startswith(GREETING)
    return bool(received) and likely and b"\n" not in received and len(received) < _LONGEST


def receive_line(connection: socket.socket) -> bytes:
    """Receives a line; if the connection is closed, the part that arrived."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST:
        more = connection.recv(_LONGEST)
        if not more:
            break
        received += more
    return received


def check_accepted(task: TaskId, answer: bytes) -> None:
    """Raises a `TrainingError` if the answer rejects the task."""
    if answer.startswith(REJECTED) and answer.endswith(b"\n"):
        reason = answer.removeprefix(REJECTED).decode(errors="replace").strip()
        raise TrainingError(
            f"the chief rejected {task}: {reason}",
            code="task-rejected",
            hint=f"install the same version of TensorFlow on every host, and give all tasks of a run the same "
            f"{RUN_SECRET}, or none",
        )


def enable_keepalive(connection: socket.socket) -> None:
    """Lets the kernel detect within half a minute that the other side failed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has only some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(nonce: bytes, text: bytes) -> bytes:
    key = os.environ.get(RUN_SECRET, "").encode(errors="surrogateescape")
    return hmac.new(key, nonce + b" " + text, hashlib.sha256).hexdigest().encode()


def _tensorflow() -> str:
    for name in _VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"
