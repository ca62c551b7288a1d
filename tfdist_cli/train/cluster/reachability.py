"""Waiting for addresses: which take a connection, whose names are known, and why one does not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

from tfdist_cli.errors import TimeoutExceeded
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

RETRY = 0.1
"""Seconds between two attempts."""
CONNECT = 5.0
"""Seconds for a connection to be made."""
START_HINT = "start every task of the cluster, and let the hosts reach each other's ports"
_NAMELESS = "its name is not resolved"


def await_up(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when every address takes a connection.

    Raises:
        TimeoutExceeded: names the tasks that did not come up within `timeout` seconds, and why.
    """
    PendingTasks(addresses, timeout).wait()


def await_names(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when every address's host has been found by its name.

    Names of pods are known a while after their pods run, and what TensorFlow does not find at once it gives up.

    Raises:
        TimeoutExceeded: names the tasks whose hosts were not found within `timeout` seconds.
    """
    PendingTasks(addresses, timeout, unresolved).wait()


class PendingTasks:
    """Which tasks are not there yet, and why."""

    def __init__(
        self, addresses: Mapping[TaskId, Address], timeout: float, probe: Callable[[Address], str | None] | None = None
    ) -> None:
        self.missing = dict(addresses)
        self._timeout = timeout
        self._probe = probe or unreachable
        self._deadline = time.monotonic() + timeout
        self._reasons: dict[TaskId, str] = {}

    def wait(self) -> None:
        """Returns when none is missing.

        Raises:
            TimeoutExceeded: as `look` does.
        """
        pause = threading.Event()
        while self.look():
            pause.wait(RETRY)  # nothing tells when another host's port opens

    def look(self) -> bool:
        """Tries those that are missing once more, and says whether any still is.

        Raises:
            TimeoutExceeded: some are, and the time is over.
        """
        for task, address in list(self.missing.items()):
            reason = self._probe(address)
            if reason is None:
                del self.missing[task]
            else:
                self._reasons[task] = reason
        if self.missing and time.monotonic() > self._deadline:
            raise TimeoutExceeded(
                pending_tasks(self.missing, self._reasons, self._timeout), code="start-timeout", hint=START_HINT
            )
        return bool(self.missing)


def unreachable(address: Address) -> str | None:
    """Why an address takes no connection; None when it does."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT).close()
    except socket.gaierror:
        return _NAMELESS
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def unresolved(address: Address) -> str | None:
    """Why the name of an address's host says nothing; None when it leads to an IP address."""
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return _NAMELESS
    return None


def wait_until_gone(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when no address takes a connection any more, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while any(unreachable(address) is None for address in addresses.values()) and time.monotonic() < deadline:
        pause.wait(RETRY / 4)


def pending_tasks(missing: Mapping[TaskId, Address], reasons: Mapping[TaskId, str], timeout: float) -> str:
    """Says which tasks have not come up in time.

    Args:
        missing: them and their addresses; empty where all are up, and only the cluster is not.
        reasons: why each is not.
        timeout: seconds that were given to them.
    """
    if not missing:
        return f"the cluster has not started within {timeout:.0f} s, though every task's port answers"
    names = "; ".join(f"{task} at {address} ({reasons[task]})" for task, address in missing.items())
    return f"not up after {timeout:.0f} s: {names}"
