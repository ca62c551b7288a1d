"""Links between tasks that are noticed when they are dead: a cable, a switch, a host that went without a word.

TCP itself waits a quarter of an hour for an answer to what it has sent, and for ever when it has sent nothing; gRPC, as
TensorFlow sets it up, sends no keep-alives. So the connections between tasks are given a bound of their own. What fails
of it is an `UnavailableError`, as when the other task has died: a lost worker's work is given to another one, and
a lost ps ends the training. A process that is stopped answers all the same, since its kernel does.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tfdist_cli.spec.address import Address

PATIENCE = 15
"""Seconds without an answer after which a connection is given up."""
_LOOK = 3.0
"""Seconds between two looks for new connections."""
_OPTIONS = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PATIENCE // 3),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PATIENCE // 6),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", PATIENCE * 1000),
)


def watch(addresses: Iterable[Address]) -> None:
    """Bounds this process's connections to and from a cluster's addresses, now and later, from a thread of its own.

    Where the system doesn't list a process's connections (it is no Linux), they stay as they are.
    """
    ports = {address.port for address in addresses}
    if ports and _DESCRIPTORS.is_dir():
        threading.Thread(target=_keep_on, args=(ports,), name="tfdist-links", daemon=True).start()


_DESCRIPTORS = Path("/proc/self/fd")


def _keep_on(ports: set[int]) -> None:
    pause, bounded = threading.Event(), set[str]()
    while True:
        bounded = bound(ports, bounded)
        pause.wait(_LOOK)  # nothing tells when TensorFlow connects


def bound(ports: set[int], known: set[str]) -> set[str]:
    """Bounds the connections with one of these ports at either end.

    Args:
        ports: the ports of the tasks.
        known: the sockets of an earlier call, which need no second look.

    Returns:
        The sockets that are there now.
    """
    found = set()
    for descriptor in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed by now
            name = str(descriptor.readlink())
            if name.startswith("socket:") and (name in known or _is_settled(int(descriptor.name), ports)):
                found.add(name)
    return found


def _is_settled(descriptor: int, ports: set[int]) -> bool:
    """Bounds one socket, if it is for us to bound; False for one that may be connected later."""
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
