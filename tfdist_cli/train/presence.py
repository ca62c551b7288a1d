"""Who is there: coming together before TensorFlow's servers meet, and noticing when the chief goes.

A task is up when its port takes a TCP connection. Before a TensorFlow server has it, the chief listens on its port
itself until every other task has connected and said its name and its version of TensorFlow, and then tells all of them
to go on. These connections stay, idle, as long as the chief lives: a ps or a worker started by hand, or in a container,
ends when its chief has ended, however early that was. Before it ends, a chief whose work is done says so. A task that
is restarted later finds TensorFlow's server on the chief's port, and an idle connection to that lives as long.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from importlib import metadata

from tfdist_cli.errors import TimeoutExceeded, TrainingError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

_RETRY = 0.1
_CONNECT = 5.0
_SILENCE = 10.0
_GREETING = b"tfdist\n"
_GO = b"go\n"
_DONE = b"done\n"
_VERSIONED = ("tensorflow", "tensorflow-cpu")
_CHIEF = TaskId("chief")
_NAMELESS = "its name is not resolved"


def gather(task: TaskId, own: Address, others: Mapping[TaskId, Address], timeout: float) -> list[socket.socket]:
    """Waits on the chief until every other task is up and has said hello.

    A server that is up but says nothing for ten seconds is not one of tfdist's, and is taken as it is.

    Returns:
        The connections by which the others see that this process lives; to be kept.

    Raises:
        TimeoutExceeded: names the tasks that did not come up within `timeout` seconds, and why.
        TrainingError: this task's port is taken, or another task has another version of TensorFlow.
    """
    absence = _Absence(others, timeout)
    silent = set(others)
    heard = time.monotonic()
    with ExitStack() as connections:
        met: list[socket.socket] = []
        with _listening(task, own) as listener:
            listener.settimeout(_RETRY)
            while absence.look() or (silent and time.monotonic() - heard < _SILENCE):
                if absence.missing:
                    heard = time.monotonic()
                with suppress(TimeoutError), ExitStack() as stranger:
                    connection = stranger.enter_context(listener.accept()[0])
                    greeted = _greet(connection)
                    if greeted:
                        silent.discard(greeted)
                        met.append(connection)
                        connections.push(stranger.pop_all())
        for connection in met:
            with suppress(OSError):  # one that has gone again is missed by TensorFlow
                connection.sendall(_GO)
        connections.pop_all()
    return met


def report_in(task: TaskId, own: Address, chief: tuple[TaskId, Address], timeout: float) -> socket.socket:
    """Waits, on a task that trains with the chief, until the chief has gathered all.

    Returns:
        The connection to the chief; to be kept.

    Raises:
        TimeoutExceeded: the chief did not come up, or not all of the others, within `timeout` seconds.
        TrainingError: this task's port is taken, or the chief has ended.
    """
    deadline = time.monotonic() + timeout
    with _listening(task, own):
        await_up(dict([chief]), timeout)
        told = b""
        try:
            connection = socket.create_connection((chief[1].host, chief[1].port), timeout=_CONNECT)
            connection.settimeout(max(_RETRY, deadline - time.monotonic()) + _CONNECT)
            if _line(connection) == _GREETING:
                connection.sendall(_hello(task))
                told = _line(connection)
        except TimeoutError:
            raise TimeoutExceeded(_absence({}, {}, timeout), hint=_START_HINT) from None
        except OSError as error:
            raise _chief_ended(chief) from error
    if told != _GO:
        connection.close()
        raise _chief_ended(chief)
    return connection


def await_up(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when every address takes a connection.

    Raises:
        TimeoutExceeded: names the tasks that did not come up within `timeout` seconds, and why.
    """
    _Absence(addresses, timeout).wait()


def await_names(addresses: Mapping[TaskId, Address], timeout: float) -> None:
    """Returns when every address's host has been found by its name.

    Names of pods are known a while after their pods run, and what TensorFlow does not find at once it gives up.

    Raises:
        TimeoutExceeded: names the tasks whose hosts were not found within `timeout` seconds.
    """
    _Absence(addresses, timeout, unresolved).wait()


def _chief_ended(chief: tuple[TaskId, Address]) -> TrainingError:
    return TrainingError(
        f"{chief[0]} at {chief[1]} has ended before the cluster had come together",
        hint=f"{chief[0]}'s own output says why; then start all tasks again",
    )


def _listening(task: TaskId, own: Address) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", own.port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise port_taken(task, own, (error.strerror or str(error)).lower()) from error


def port_taken(task: TaskId, own: Address, reason: str) -> TrainingError:
    """The error of a task whose port another program has."""
    return TrainingError(
        f"{task} cannot serve at {own}: {reason}",
        hint=f"another program may have port {own.port}: end it, or give {task} another address",
    )


def _greet(connection: socket.socket) -> TaskId | None:
    """Asks a new connection who it is; None when it is nobody of ours.

    Raises:
        TrainingError: it has another version of TensorFlow.
    """
    connection.settimeout(_CONNECT)
    try:
        connection.sendall(_GREETING)
        hello = json.loads(_line(connection))
        task, theirs = TaskId.parse(hello["task"]), hello["tensorflow"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a port scanner, perhaps, or somebody who has gone again
    connection.settimeout(None)
    _keep_alive(connection)
    ours = _tensorflow()
    if theirs != ours:
        raise TrainingError(
            f"{task} has TensorFlow {theirs}, and the chief has {ours}",
            hint="install the same version of TensorFlow on every host",
        )
    return task


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < 4096:
        more = connection.recv(4096)
        if not more:
            break
        received += more
    return received


def _hello(task: TaskId) -> bytes:
    return json.dumps({"task": str(task), "tensorflow": _tensorflow()}).encode() + b"\n"


def _tensorflow() -> str:
    for name in _VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


class _Absence:
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
            pause.wait(_RETRY)  # nothing tells when another host's port opens

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
            raise TimeoutExceeded(_absence(self.missing, self._reasons, self._timeout), hint=_START_HINT)
        return bool(self.missing)


def unreachable(address: Address) -> str | None:
    """Why an address takes no connection; None when it does."""
    try:
        socket.create_connection((address.host, address.port), timeout=_CONNECT).close()
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
        pause.wait(_RETRY / 4)


def say_done(connections: Iterable[int]) -> None:
    """Tells the others that the chief's work is done, and that it goes for that reason.

    Args:
        connections: the file numbers of those that `gather` returned.
    """
    for connection in connections:
        with suppress(OSError):  # one that has gone already needs no word
            os.write(connection, _DONE)


def outlast(task: TaskId, chief: Address, timeout: float) -> bool:
    """Waits for the chief to come up, then for it to go.

    Args:
        task: who waits.
        chief: where the chief is.
        timeout: seconds for it to come up.

    Returns:
        Whether the chief's work was done, as far as it is known: False if it had gathered its tasks and went without a
        word.

    Raises:
        TimeoutExceeded: it did not come up within `timeout` seconds.
    """
    lifeline = _Lifeline(task, chief)
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            lifeline.hold()
        except ConnectionResetError:
            continue  # either way, the next connection attempt tells whether the chief is still there
        except OSError as error:
            if lifeline.met:
                return lifeline.done
            if time.monotonic() > deadline:
                absent = {_CHIEF: chief}
                text = _absence(absent, {_CHIEF: unreachable(chief) or "no answer"}, timeout)
                raise TimeoutExceeded(text, hint=_START_HINT) from error
            pause.wait(_RETRY)  # nothing tells when another host's port opens


class _Lifeline:
    """A connection to the chief that lasts as long as it does.

    Args:
        task: whose it is.
        chief: where the chief is.

    Attributes:
        met: whether the chief was there.
        done: whether its work was done when it went, as far as it is known.
    """

    def __init__(self, task: TaskId, chief: Address) -> None:
        self.met = False
        self.done = True
        self._task = task
        self._chief = chief

    def hold(self) -> None:
        """Connects, says hello to a chief that gathers its tasks, and returns when the other side ends the connection.

        gRPC ends one that says nothing when it tires of it.

        Raises:
            OSError: nobody is there, or the connection broke. A tunnel's end takes connections whether anybody is
                behind it or not; one that ends without a word had nobody, since chiefs speak first.
        """
        with socket.create_connection((self._chief.host, self._chief.port), timeout=_CONNECT) as connection:
            connection.settimeout(None)
            _keep_alive(connection)
            received = connection.recv(4096)
            if not received:
                raise ConnectionAbortedError("the connection ended without a word")
            self.met = True
            if received.startswith(_GREETING):
                self.done = False
                connection.sendall(_hello(self._task))
            said = b""
            while received := connection.recv(4096):
                said = (said + received)[-len(_DONE) :]
                self.done = self.done or said == _DONE


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
