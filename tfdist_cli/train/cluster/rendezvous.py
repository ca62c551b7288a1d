"""Rendezvous: all tasks wait for each other before TensorFlow's servers start, and detect when the chief exits.

A task has started when its port accepts a TCP connection. Before TensorFlow's server uses the chief's port, the chief
listens there until every other task has connected and sent its name and its version of TensorFlow (`handshake`). Then
it tells all of them to continue. These connections stay open and idle as long as the chief lives: a ps or worker that
was started by hand, or in a container, exits when its chief has exited, however early. A chief whose work is done
announces that before it exits. A task that is restarted later finds TensorFlow's server on the chief's port, and its
idle connection to that server lives as long.

Tasks with a direct all-reduce (`all_reduce`) connect to each other at the same time, on the same ports.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from types import MappingProxyType

from tfdist_cli.errors import TimeoutExceeded, TrainingError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.handshake import (
    LATER,
    PERIOD,
    HandshakeListener,
    check_accepted,
    enable_keepalive,
    hello_message,
    is_greeting,
    receive_greeting,
    receive_line,
)
from tfdist_cli.train.cluster.reachability import (
    CONNECT,
    RETRY,
    START_HINT,
    PendingTasks,
    await_up,
    pending_tasks,
    unreachable,
)

Join = Callable[[Callable[[], None]], bool]
"""Joins a chief that trains, calls a function, and returns when the chief has exited: whether its work was done."""
NO_GROUP: Mapping[TaskId, Address] = MappingProxyType({})
_SILENCE = 10.0
_GO = b"go\n"
_GO_TOGETHER = b"go together\n"
DONE = b"done\n"
"""What a chief whose work is done announces."""
_CHIEF = TaskId("chief")
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class RendezvousResult:
    """The connections of a rendezvous.

    Args:
        lifelines: the connections by which other tasks detect that this process exits, or by which this one detects
            that the chief exits; to be kept open.
        links: a connection to each other task of the all-reduce group; empty if TensorFlow's collectives are used.
    """

    lifelines: Sequence[socket.socket] = ()
    links: Mapping[TaskId, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """Closes all connections."""
        for connection in (*self.lifelines, *self.links.values()):
            connection.close()


def gather_tasks(
    task: TaskId,
    own: Address,
    others: Mapping[TaskId, Address],
    timeout: float,
    group: Mapping[TaskId, Address] = NO_GROUP,
    later: Collection[TaskId] = (),
) -> RendezvousResult:
    """Waits on the chief until every other task has started and identified itself.

    A server that accepts connections but sends nothing for ten seconds is accepted without identification: it was not
    started by tfdist.

    Args:
        task: this task.
        own: its address.
        others: the tasks to wait for.
        timeout: seconds to wait.
        group: the tasks of the all-reduce group, with this one, in the same order on every task. If a task has no
            group, no task uses one.
        later: tasks that may join the training once it runs.

    Raises:
        TimeoutExceeded: names the tasks that did not start within `timeout` seconds, and why. A task that was rejected,
            for its version of TensorFlow for example, has not started.
        TrainingError: this task's port is in use.
    """
    deadline = time.monotonic() + timeout
    pending = PendingTasks(others, timeout)
    pending.announce()
    silent, summing = set(others), {task}
    looked_at, silence = time.monotonic(), 0.0
    with ExitStack() as connections, listen(task, own) as listener:
        lifelines: list[socket.socket] = []
        handshakes = connections.enter_context(closing(HandshakeListener(listener, others.keys(), later)))
        while pending.update() or (silent and silence < _SILENCE):
            rejected = {other: others[other] for other in handshakes.rejected if other in silent}
            passed, looked_at = min(time.monotonic() - looked_at, PERIOD), time.monotonic()
            silence = 0.0 if pending.missing or rejected else silence + passed
            if rejected and looked_at > deadline:
                raise TimeoutExceeded(
                    pending_tasks(rejected, handshakes.rejected, timeout), code="start-timeout", hint=START_HINT
                )
            for connection, hello in handshakes.identified(RETRY):
                silent.discard(hello.task)
                if hello.sums:
                    summing.add(hello.task)
                lifelines.append(connections.enter_context(connection))
        together = bool(group) and summing >= group.keys()
        for connection in lifelines:
            with suppress(OSError):  # TensorFlow reports a task that exited meanwhile
                connection.sendall(_GO_TOGETHER if together else _GO)
        links = _connect_group(task, group, handshakes, deadline) if together else {}
        handshakes.close()
        connections.pop_all()
    return RendezvousResult(lifelines, links)


def report_to_chief(
    task: TaskId,
    own: Address,
    chief: tuple[TaskId, Address],
    timeout: float,
    group: Mapping[TaskId, Address] = NO_GROUP,
) -> RendezvousResult:
    """Waits, on a task that trains with the chief, until the chief has gathered all tasks.

    Args:
        task: this task.
        own: its address.
        chief: the chief and its address.
        timeout: seconds to wait.
        group: as in `gather_tasks`.

    Raises:
        TimeoutExceeded: the chief or another task did not start within `timeout` seconds.
        TrainingError: this task's port is in use, the chief exited, or it rejected this task.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as connections, listen(task, own) as listener:
        await_up(dict([chief]), timeout)
        answer = b""
        try:
            connection = connections.enter_context(
                socket.create_connection((chief[1].host, chief[1].port), timeout=CONNECT)
            )
            connection.settimeout(max(RETRY, deadline - time.monotonic()) + CONNECT)
            if is_greeting(greeting := receive_greeting(connection)):
                connection.sendall(hello_message(task, greeting, sums=bool(group)))
                answer = receive_line(connection)
                check_accepted(task, answer)
        except TimeoutError:
            raise TimeoutExceeded(pending_tasks({}, {}, timeout), code="start-timeout", hint=START_HINT) from None
        except OSError as error:
            raise _exited_early(*chief) from error
        if answer not in (_GO, _GO_TOGETHER):
            raise _exited_early(*chief)
        links = {}
        if answer == _GO_TOGETHER:
            with closing(HandshakeListener(listener, group.keys())) as handshakes:
                links = _connect_group(task, group, handshakes, deadline)
        connections.pop_all()
    return RendezvousResult([connection], links)


def _connect_group(
    task: TaskId, group: Mapping[TaskId, Address], handshakes: HandshakeListener, deadline: float
) -> dict[TaskId, socket.socket]:
    """Connects a task with all others of its group: it connects to those before it, and accepts those after it.

    Args:
        task: this task.
        group: all tasks of the group, and their addresses.
        handshakes: accepts the tasks that connect.
        deadline: when all this must be done.

    Raises:
        TimeoutExceeded: names the tasks that do not connect, or do not answer, in time.
        TrainingError: one of them exited.
    """
    order = list(group)
    place = order.index(task)
    links: dict[TaskId, socket.socket] = {}
    with ExitStack() as made:
        for other in order[:place]:
            links[other] = made.enter_context(_connect_to(task, other, group[other], deadline))
        while missing := [other for other in order[place + 1 :] if other not in links]:
            if time.monotonic() > deadline:
                raise TimeoutExceeded(
                    f"{task} got no connection from {', '.join(map(str, missing))}",
                    code="start-timeout",
                    hint=START_HINT,
                )
            for connection, hello in handshakes.identified(RETRY):
                if hello.task in missing:
                    links[hello.task] = made.enter_context(connection)
                else:
                    connection.close()
        for link in links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.pop_all()
    return links


def _connect_to(task: TaskId, other: TaskId, address: Address, deadline: float) -> socket.socket:
    """Connects to a task of the group, and identifies this one to it."""
    with ExitStack() as made:
        try:
            connection = made.enter_context(socket.create_connection((address.host, address.port), timeout=CONNECT))
            connection.settimeout(max(RETRY, deadline - time.monotonic()))
            greeting = receive_greeting(connection)
            connection.sendall(hello_message(task, greeting, sums=True))
        except TimeoutError:
            raise TimeoutExceeded(
                f"{task} got no answer from {other} at {address}", code="start-timeout", hint=START_HINT
            ) from None
        except OSError as error:
            raise _exited_early(other, address) from error
        if not is_greeting(greeting):
            raise _exited_early(other, address)
        enable_keepalive(connection)
        made.pop_all()
    return connection


def _exited_early(task: TaskId, address: Address) -> TrainingError:
    return TrainingError(
        f"{task} at {address} exited before all tasks had started",
        code="task-lost",
        hint=f"see the output of {task} for the reason; then start all tasks again",
    )


def listen(task: TaskId, own: Address) -> socket.socket:
    """Listens at a task's port, on all interfaces.

    Raises:
        TrainingError: the port is in use.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", own.port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise port_in_use(task, own, (error.strerror or str(error)).lower()) from error


def port_in_use(task: TaskId, own: Address, reason: str) -> TrainingError:
    """Returns the error of a task whose port another program uses."""
    return TrainingError(
        f"{task} cannot serve at {own}: {reason}",
        code="port-in-use",
        hint=f"another program may use port {own.port}: end it, or give {task} another address",
    )


def announce_done(connections: Iterable[int]) -> None:
    """Tells the other tasks that the chief exits because its work is done.

    Args:
        connections: the file descriptors of the lifelines that `gather_tasks` returned.
    """
    for connection in connections:
        with suppress(OSError):  # that task has exited already
            os.write(connection, DONE)


def wait_until_exited(task: TaskId, chief: Address, timeout: float, join: Join | None = None) -> bool:
    """Waits until the chief has started, then until it has exited.

    Args:
        task: this task.
        chief: the chief's address.
        timeout: seconds for the chief to start.
        join: joins a chief that trains already; by default this task belongs to the chief.

    Returns:
        False if the chief gathered its tasks and then exited without announcing that its work is done; else True.

    Raises:
        TimeoutExceeded: the chief did not start within `timeout` seconds.
        TrainingError: the chief rejected this task.
    """
    lifeline = _Lifeline(task, chief, join)
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            lifeline.hold()
        except ConnectionResetError:
            continue  # the next attempt to connect finds out whether the chief is still there
        except OSError as error:
            if lifeline.connected:
                return lifeline.done
            if time.monotonic() > deadline:
                absent = {_CHIEF: chief}
                text = pending_tasks(absent, {_CHIEF: unreachable(chief) or "no answer"}, timeout)
                raise TimeoutExceeded(text, code="start-timeout", hint=START_HINT) from error
            pause.wait(RETRY)  # no event announces that a port of another host opens


class _Lifeline:
    """A connection to the chief that stays open as long as the chief lives.

    Args:
        task: this task.
        chief: the chief's address.
        join: see `wait_until_exited`.

    Attributes:
        connected: whether there was a connection to the chief, as one of its tasks.
        done: False if the chief exited without announcing that its work is done, as far as it is known.
    """

    def __init__(self, task: TaskId, chief: Address, join: Join | None) -> None:
        self.connected = False
        self.done = True
        self._join = join
        self._task = task
        self._chief = chief

    def hold(self) -> None:
        """Connects, identifies this task to a chief that gathers its tasks, and returns when the connection is closed.

        gRPC closes an idle connection after some time.

        Raises:
            OSError: there is no chief, or the connection broke. The end of a tunnel accepts connections without a chief
                behind it; it then closes them without sending anything, while chiefs send first.
            TrainingError: the chief rejected this task.
        """
        with socket.create_connection((self._chief.host, self._chief.port), timeout=CONNECT) as connection:
            connection.settimeout(None)
            enable_keepalive(connection)
            greeting = receive_greeting(connection)
            if not greeting:
                raise ConnectionAbortedError("the connection was closed without any data")
            if is_greeting(greeting):
                connection.sendall(hello_message(self._task, greeting))
                self._listen_to_chief(connection)
                return
            if self._join:
                try:
                    self.done = self._join(self._has_joined)
                except ConnectionRefusedError:
                    log.warning("the chief takes no workers that join: this one serves it only if it was there before")
                else:
                    return
            self.connected = True
            while connection.recv(4096):
                pass

    def _has_joined(self) -> None:
        self.connected = True

    def _listen_to_chief(self, connection: socket.socket) -> None:
        """Returns when a chief that gathers its tasks, and then trains with them, closes the connection."""
        before = self.connected, self.done
        self.connected, self.done = True, False
        tail = b""
        while received := connection.recv(4096):
            tail = (tail + received)[-4096:]
            check_accepted(self._task, tail)
            if tail == LATER:
                self.connected, self.done = before
                raise ConnectionAbortedError("the chief takes this task when those of the start are there")
            self.done = self.done or tail.endswith(DONE)
        if self._join and not tail:
            # The chief had all tasks of the start before it read who this is.
            self.connected, self.done = before
            raise ConnectionAbortedError("the chief closed the connection before it answered")
