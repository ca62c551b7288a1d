"""Who is there: waiting for the other tasks to come up, and noticing when the chief goes.

A task is up when its port takes a TCP connection. An idle connection to the chief's port lives as long as the chief
does, so that a ps or a worker started by hand, or in a container, ends when its chief has ended.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from tfdist_cli.errors import ExitCode, TimeoutExceeded
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

_RETRY = 0.1
_CONNECT = 5.0


def wait_for(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when every address takes a connection.

    Raises:
        TimeoutExceeded: names the tasks that did not come up within `timeout` seconds, and why.
    """
    missing = dict(addresses)
    deadline = time.monotonic() + timeout
    reasons: dict[TaskId, str] = {}
    pause = threading.Event()
    while missing:
        for task, address in list(missing.items()):
            reason = unreachable(address)
            if reason is None:
                del missing[task]
            else:
                reasons[task] = reason
        if missing and time.monotonic() > deadline:
            raise TimeoutExceeded(_absence(missing, reasons, timeout), hint=_START_HINT)
        if missing:
            pause.wait(_RETRY)  # nothing tells when another host's port opens


def unreachable(address: Address) -> str | None:
    """Why an address takes no connection; None when it does."""
    try:
        socket.create_connection((address.host, address.port), timeout=_CONNECT).close()
    except socket.gaierror:
        return "its name is not resolved"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def wait_until_gone(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when no address takes a connection any more, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while any(unreachable(address) is None for address in addresses.values()) and time.monotonic() < deadline:
        pause.wait(_RETRY / 4)


def outlast(chief: Address, timeout: float) -> None:
    """Waits for the chief to come up, then for it to go.

    Raises:
        TimeoutExceeded: it did not come up within `timeout` seconds.
    """
    wait_for({TaskId("chief"): chief}, timeout)
    while True:
        try:
            with socket.create_connection((chief.host, chief.port), timeout=_CONNECT) as connection:
                connection.settimeout(None)
                _keep_alive(connection)
                while connection.recv(4096):  # nothing is ever said; it ends with the chief, or when gRPC tires of it
                    pass
        except ConnectionResetError:
            continue  # either way, the next connection attempt tells whether the chief is still there
        except OSError:
            return


class StartWatch:
    """Ends this process when its cluster has not come up in time; TensorFlow's own start would wait without a word.

    Args:
        addresses: the other tasks.
        timeout: seconds.
    """

    def __init__(self, addresses: Mapping[TaskId, Address], timeout: float) -> None:
        self._addresses = dict(addresses)
        self._timeout = timeout
        self._up = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="start-watch", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._up.set()

    def _watch(self) -> None:
        if self._up.wait(self._timeout):
            return
        reasons = {task: unreachable(address) for task, address in self._addresses.items()}
        missing = {task: self._addresses[task] for task, reason in reasons.items() if reason}
        text = _absence(missing, {task: reason or "" for task, reason in reasons.items()}, self._timeout)
        sys.stderr.write(f"error: {text}\nhint: {_START_HINT}\n")
        sys.stderr.flush()
        os._exit(ExitCode.TIMEOUT)  # the main thread is inside TensorFlow and cannot be interrupted


_START_HINT = "start every task of the cluster, and let the hosts reach each other's ports"


def _absence(missing: Mapping[TaskId, Address], reasons: Mapping[TaskId, str], timeout: float) -> str:
    if not missing:
        return f"the cluster has not started within {timeout:.0f} s, though every task's port answers"
    names = "; ".join(f"{task} at {address} ({reasons[task]})" for task, address in missing.items())
    return f"not up after {timeout:.0f} s: {names}"


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has only some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
