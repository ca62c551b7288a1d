"""Detects dead connections between tasks: a broken cable or switch, or a host that failed.

TCP waits a quarter of an hour for an acknowledgement, and forever if it has sent nothing. TensorFlow configures gRPC
without keep-alives. So the sockets between tasks get TCP timeouts. A connection that times out fails with
`UnavailableError`, as when the other task failed: the steps of a lost worker run on another one, and a lost ps ends the
training. A stopped process still answers, since its kernel does.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from tfdist_cli.spec.address import Address

PATIENCE = 15
"""Seconds without an acknowledgement after which a connection fails."""
_PERIOD = 3.0
"""Seconds between two searches for new connections."""
_OPTIONS = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PATIENCE // 3),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PATIENCE // 6),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", PATIENCE * 1000),
)


def watch(addresses: Iterable[Address]) -> None:
    """Sets timeouts, in a thread, on this process's connections to and from a cluster's addresses.

    A later call adds addresses.

    Does nothing on systems that do not list the connections of a process in /proc (other than Linux).
    """
    ports = {address.port for address in addresses}
    if ports and _DESCRIPTORS.is_dir() and not _watched:
        threading.Thread(target=_run, name="tfdist-keep-alive", daemon=True).start()
    _watched.update(ports)


_watched: set[int] = set()
"""The ports of all clusters' tasks; there are more when a worker joins."""
_DESCRIPTORS = Path("/proc/self/fd")


def _run() -> None:
    pause, known, ports = threading.Event(), set[str](), frozenset[int]()
    while True:
        if ports != _watched:
            known, ports = set(), frozenset(_watched)
        known = set_timeouts(ports, known)
        pause.wait(_PERIOD)  # no event announces that TensorFlow connects


def set_timeouts(ports: AbstractSet[int], known: set[str]) -> set[str]:
    """Sets timeouts on the connections with one of these ports at either end.

    Args:
        ports: the ports of the tasks.
        known: the sockets that an earlier call returned; they are skipped.

    Returns:
        All sockets that need no further call.
    """
    found = set()
    for descriptor in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # it was closed meanwhile
            name = str(descriptor.readlink())
            if name.startswith("socket:") and (name in known or _is_settled(int(descriptor.name), ports)):
                found.add(name)
    return found


def _is_settled(descriptor: int, ports: AbstractSet[int]) -> bool:
    """Sets timeouts on a socket if it has one of the ports; returns False for one that may be connected later."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
            return True
        if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return True
        try:
            ends = {same.getpeername()[1], same.getsockname()[1]}
        except OSError:
            return False
        for level, option, value in _OPTIONS if ends & ports else ():
            same.setsockopt(level, getattr(socket, option), value)
        return True
