"""The first messages of a connection from an engine: who connects, and a proof that it knows the run's secret.

The launcher sends a random line. The other side answers with a JSON object of its number, its host and a keyed hash of
these and the random line. The secret itself is not sent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
from dataclasses import dataclass

DRIVER = -1
"""The number of the engine's driver; slots count from 0."""
SECRET = "TFDIST_SLOT_SECRET"  # noqa: S105 the name of a variable
"""The variable with which the driver gets the secret."""
OPTIONS = "TFDIST_SLOT_OPTIONS"
"""The variable with which the driver gets the engine's secret options, as a JSON object."""
HANDSHAKE_SECONDS = 10.0
_LONGEST_LINE = 4096
_LOSS_OPTIONS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 15_000}
"""A host that is cut off is lost after 15 s, whether something is sent or not."""


@dataclass(frozen=True)
class Caller:
    """Who has connected.

    Args:
        slot: the number of the slot, or `DRIVER`.
        host: the host name or address under which the other slots reach this one.
    """

    slot: int
    host: str


def connect(launcher: tuple[str, int], secret: str, caller: Caller) -> socket.socket:
    """Connects to the launcher.

    Raises:
        OSError: the launcher cannot be reached.
    """
    connection = socket.create_connection(launcher, timeout=HANDSHAKE_SECONDS)
    nonce = _read_line(connection)
    answer = {"slot": caller.slot, "host": caller.host, "proof": _proof(secret, nonce, caller)}
    connection.sendall(json.dumps(answer).encode() + b"\n")
    _notice_loss(connection)
    return connection


def exit_with(connection: socket.socket) -> None:
    """Ends this process when the launcher ends the connection, also by its death."""
    while connection.recv(1024):
        pass
    os._exit(1)


def accept(connection: socket.socket, secret: str) -> Caller | None:
    """Returns who has connected to the launcher; None if it does not know the secret."""
    connection.settimeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_hex().encode()
    try:
        connection.sendall(nonce + b"\n")
        answer = json.loads(_read_line(connection))
        caller = Caller(int(answer["slot"]), str(answer["host"]))
        if not hmac.compare_digest(str(answer["proof"]), _proof(secret, nonce, caller)):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    _notice_loss(connection)
    return caller


def _notice_loss(connection: socket.socket) -> None:
    """Lets reads wait without end, but ends the connection if the other host answers nothing for some time."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LOSS_OPTIONS.items():
        if hasattr(socket, name):  # Linux has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(secret: str, nonce: bytes, caller: Caller) -> str:
    message = b"%s %d %s" % (nonce, caller.slot, caller.host.encode())
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket) -> bytes:
    """Reads one line, byte by byte: what follows belongs to the agent."""
    line = b""
    while len(line) < _LONGEST_LINE:
        byte = connection.recv(1)
        if byte in (b"", b"\n"):
            return line
        line += byte
    raise ValueError("the line is too long")
