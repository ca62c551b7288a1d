"""How tasks say who they are to whom they connect, and how these ask them: a line each way.

The one that listens speaks first, so that whoever connects knows whether it is one of tfdist's: `tfdist NONCE`. The
other answers `PROOF {json}`, where the proof is HMAC-SHA256 of the nonce and the JSON with the run's secret for its
key, which the launcher gives to each task (`TFDIST_RUN_SECRET`). Tasks that were started by hand may have none, and
prove no more than that they speak this protocol.

Whoever can reach the port may connect and say anything. What is not one of the run's tasks is sent away, noted once,
and never ends the task that listens.
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
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.reachability import CONNECT

GREETING = b"tfdist "
"""What the one that listens says first; a nonce follows."""
REFUSED = b"no "
"""What it answers to one that it sends away; the reason follows."""
_LONGEST = 4096
"""Bytes of a line; nobody of ours says so much."""
PERIOD = 1.0
"""The most seconds that count from one look to the next: after a pause of the whole machine the others have their time
left to go on."""
_MOST_ASKED = 256
"""Connections that may be asked who they are at the same time; the oldest is sent away for a further one."""
_NONCE = re.compile(rb"tfdist ([0-9a-f]{32})\n")
_VERSIONED = ("tensorflow", "tensorflow-cpu")
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Hello:
    """What a task says of itself.

    Args:
        task: its name.
        sums: whether it has a circle to sum up with.
        tensorflow: its version of TensorFlow.
    """

    task: TaskId
    sums: bool
    tensorflow: str

    @classmethod
    def read(cls, text: bytes) -> Hello:
        """Reads its JSON.

        Raises:
            ValueError: it says something else.
        """
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        match content:
            case {"task": str(task), "tensorflow": str(tensorflow), "sums": bool(sums)}:
                return cls(TaskId.parse(task), sums, tensorflow)
        raise ValueError("it is not what a task says of itself")


class Reception:
    """Asks whoever connects who they are, all at the same time: one that says nothing keeps nobody waiting.

    Args:
        listener: where they connect.
        expected: the tasks that may; others are sent away.

    Attributes:
        refused: tasks that were sent away though they are expected, and why.
    """

    def __init__(self, listener: socket.socket, expected: Collection[TaskId]) -> None:
        listener.setblocking(False)
        self.refused: dict[TaskId, str] = {}
        self._expected = expected
        self._listener = listener
        self._asked: dict[socket.socket, _Asked] = {}
        """Those that have not said it yet."""
        self._looked_at = time.monotonic()
        self._noted = False
        """Whether it was told that somebody was sent away."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Lets those go that have not said who they are."""
        for connection in list(self._asked):
            self._forget(connection)
            connection.close()
        self._selector.close()

    def arrived(self, seconds: float) -> list[tuple[socket.socket, Hello]]:
        """The connections of those that have said who they are by now, or do so in a moment."""
        found = []
        for key, _ in self._selector.select(seconds):
            connection = cast("socket.socket", key.fileobj)
            if connection is self._listener:
                self._ask()
            elif connection in self._asked and (hello := self._heard(connection)) is not None:
                found.append((connection, hello))
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, PERIOD), now
        for connection, asked in list(self._asked.items()):
            asked.left -= passed
            if asked.left < 0:
                self._send_away(connection, asked, "it did not say who it is in time")
        return found

    def _ask(self) -> None:
        if len(self._asked) >= _MOST_ASKED:
            oldest = next(iter(self._asked))
            self._send_away(oldest, self._asked[oldest], "too many others connected")
        with suppress(OSError), ExitStack() as stranger:  # it may have gone again
            connection, address = self._listener.accept()
            stranger.enter_context(connection)
            connection.setblocking(False)
            nonce = secrets.token_hex(16).encode()
            connection.send(GREETING + nonce + b"\n")
            self._selector.register(connection, selectors.EVENT_READ)
            self._asked[connection] = _Asked(nonce, str(address[0]).removeprefix("::ffff:"), CONNECT)
            stranger.pop_all()

    def _heard(self, connection: socket.socket) -> Hello | None:
        """Who a connection says it is; None while it has not said all, or when it is nobody of ours."""
        asked = self._asked[connection]
        try:
            more = connection.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        asked.said += more
        if more and not asked.said.endswith(b"\n") and len(asked.said) < _LONGEST:
            return None
        try:
            hello = self._checked(asked)
        except ValueError as error:
            self._send_away(connection, asked, str(error))
            return None
        self._forget(connection)
        connection.setblocking(True)
        keep_alive(connection)
        return hello

    def _checked(self, asked: _Asked) -> Hello:
        """What a connection has said.

        Raises:
            ValueError: it is none of the run's tasks, or one that must not take part.
        """
        proof, _, text = asked.said.removesuffix(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, _proof(asked.nonce, text)):
            raise ValueError(f"it did not prove that it has the run's secret ({RUN_SECRET})")
        hello = Hello.read(text)
        if hello.task not in self._expected and hello.task.traits.listens:
            raise ValueError(f"{hello.task} is not a task that is waited for")
        if hello.tensorflow != (ours := _tensorflow()):
            reason = f"it has TensorFlow {hello.tensorflow[:40]!a}, and the chief has {ours!r}"
            self.refused[hello.task] = reason
            raise ValueError(reason)
        self.refused.pop(hello.task, None)
        return hello

    def _send_away(self, connection: socket.socket, asked: _Asked, reason: str) -> None:
        """Ends a connection. One that has said nothing only looked whether the port is open, as tasks do."""
        self._forget(connection)
        if asked.said:
            with suppress(OSError):  # it has gone already
                connection.send(REFUSED + reason.encode() + b"\n")
            if not self._noted:
                self._noted = True
                log.warning(
                    "a connection from %s was refused: %s; further ones are refused without a word", asked.host, reason
                )
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._asked[connection]


@dataclass
class _Asked:
    """A connection that has not said yet who it is.

    Args:
        nonce: what it has to prove that it has the secret with.
        host: where it comes from.
        left: seconds in which it must have said it.
        said: what it has said so far.
    """

    nonce: bytes
    host: str
    left: float
    said: bytes = b""


def hello_of(task: TaskId, greeting: bytes, *, sums: bool = False) -> bytes:
    """What a task says of itself to one that has said `greeting`; `sums` as in `Hello`."""
    text = json.dumps({"task": str(task), "tensorflow": _tensorflow(), "sums": sums}).encode()
    asked = _NONCE.fullmatch(greeting)
    return _proof(asked[1] if asked else b"", text) + b" " + text + b"\n"


def is_ours(greeting: bytes) -> bool:
    """Whether it is a task of tfdist's that has said it."""
    return bool(_NONCE.fullmatch(greeting))


def greeting_of(connection: socket.socket) -> bytes:
    """The first that the other side says: a whole line if it is one of ours, and whatever comes if it is not."""
    said = connection.recv(_LONGEST)
    while _begins(said) and (more := connection.recv(_LONGEST)):
        said += more
    return said


def _begins(said: bytes) -> bool:
    """Whether it may be the beginning of a greeting, and not all of it."""
    likely = GREETING.startswith(said) or said.startswith(GREETING)
    return bool(said) and likely and b"\n" not in said and len(said) < _LONGEST


def line_of(connection: socket.socket) -> bytes:
    """The next line that comes; less of it where the connection ends."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST:
        more = connection.recv(_LONGEST)
        if not more:
            break
        received += more
    return received


def check_taken(task: TaskId, answer: bytes) -> None:
    """Raises `TrainingError` if the answer to a task is that it was sent away."""
    if answer.startswith(REFUSED) and answer.endswith(b"\n"):
        reason = answer.removeprefix(REFUSED).decode(errors="replace").strip()
        raise TrainingError(
            f"the chief refuses {task}: {reason}",
            hint=f"install the same version of TensorFlow on every host, and give all tasks of a run the same "
            f"{RUN_SECRET}, or none",
        )


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel notice within half a minute when the other side is no more."""
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
