"""Waits until addresses accept connections or host names resolve, and reports the reason for those that do not."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from tfdist_cli.errors import TimeoutExceeded
from tfdist_cli.protocol.records import records_enabled
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

log = logging.getLogger("tfdist")
RETRY = 0.1
"""Seconds between two attempts."""
CONNECT = 5.0
"""Seconds for making a connection."""
START_HINT = "start every task of the cluster, and let the hosts reach each other's ports"
_UNRESOLVED = "its name is not resolved"


def await_up(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Waits until every address accepts a connection.

    Raises:
        TimeoutExceeded: names the tasks that did not start within `timeout` seconds, and why.
    """
    pending = PendingTasks(addresses, timeout)
    pending.announce()
    pending.wait()


def await_names(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Waits until the host name of every address resolves; logs the tasks for which it has to wait.

    The name of a pod resolves some time after the pod starts, and TensorFlow does not retry a name that fails.

    Raises:
        TimeoutExceeded: names the tasks whose host names did not resolve within `timeout` seconds.
    """
    pending = PendingTasks(addresses, timeout, unresolved)
    if pending.update():
        log.info("waiting up to %.0f s until host names resolve: %s", timeout, pending)
        pending.wait()


class PendingTasks:
    """The tasks that have not started yet, and why.

    Args:
        addresses: the tasks to wait for.
        timeout: seconds for all of them.
        probe: returns the reason why an address is not ready, or None; by default `unreachable`.

    Attributes:
        missing: the tasks that have not started yet.
    """

    def __init__(
        self, addresses: Mapping[TaskId, Address], timeout: float, probe: Callable[[Address], str | None] | None = None
    ) -> None:
        self.missing = dict(addresses)
        self._timeout = timeout
        self._probe = probe or unreachable
        self._deadline = time.monotonic() + timeout
        self._reasons: dict[TaskId, str] = {}

    def __str__(self) -> str:
        return ", ".join(f"{task} at {address}" for task, address in self.missing.items())

    def announce(self) -> None:
        """Logs which tasks have not started yet, unless a launcher shows them."""
        if self.update() and not records_enabled():
            log.info("waiting up to %.0f s for %s", self._timeout, self)

    def wait(self) -> None:
        """Waits until no task is missing.

        Raises:
            TimeoutExceeded: as `update` does.
        """
        pause = threading.Event()
        while self.update():
            pause.wait(RETRY)  # no event announces that a port of another host opens

    def update(self) -> bool:
        """Probes the missing tasks again; returns whether any is still missing.

        Raises:
            TimeoutExceeded: tasks are missing, and the timeout has passed.
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
    """Returns the reason why an address accepts no connection; None if it does."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT).close()
    except socket.gaierror:
        return _UNRESOLVED
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def unresolved(address: Address) -> str | None:
    """Returns the reason why the host name of an address does not resolve; None if it does."""
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return _UNRESOLVED
    return None


def wait_until_closed(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Waits until no address accepts a connection any more, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while any(unreachable(address) is None for address in addresses.values()) and time.monotonic() < deadline:
        pause.wait(RETRY / 4)


def pending_tasks(missing: Mapping[TaskId, Address], reasons: Mapping[TaskId, str], timeout: float) -> str:
    """Returns the message that names the tasks that did not start in time.

    Args:
        missing: the tasks and their addresses; empty if all started, but the cluster did not.
        reasons: the reason for each task.
        timeout: the timeout in seconds.
    """
    if not missing:
        return f"the cluster did not start within {timeout:.0f} s, although the port of every task answers"
    names = "; ".join(f"{task} at {address} ({reasons[task]})" for task, address in missing.items())
    return f"these tasks did not start within {timeout:.0f} s: {names}"
