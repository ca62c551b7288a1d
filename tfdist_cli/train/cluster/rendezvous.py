"""Who is there: coming together before TensorFlow's servers meet, and noticing when the chief goes.

A task is up when its port takes a TCP connection. Before a TensorFlow server has it, the chief listens on its port
itself until every other task has connected and said its name and its version of TensorFlow, and then tells all of them
to go on. See `reception` for how they prove that they are of this run. These connections stay, idle, as long as the
chief lives: a ps or a worker started by hand, or in a container, ends when its chief has ended, however early that was.
Before it ends, a chief whose work is done says so. A task that is restarted later finds TensorFlow's server on the
chief's port, and an idle connection to that lives as long.

Tasks that sum up with one another (`train.mesh`) are connected for that in the same moment, at the same ports.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from types import MappingProxyType

from tfdist_cli.errors import TimeoutExceeded, TrainingError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.handshake import (
    PERIOD,
    Reception,
    check_taken,
    greeting_of,
    hello_of,
    is_ours,
    keep_alive,
    line_of,
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

NOBODY: Mapping[TaskId, Address] = MappingProxyType({})
_SILENCE = 10.0
_GO = b"go\n"
_GO_TOGETHER = b"go together\n"
_DONE = b"done\n"
_CHIEF = TaskId("chief")


@dataclass(frozen=True)
class RendezvousResult:
    """Whom a task has come together with.

    Args:
        lifelines: the connections by which the others see that this process lives, or by which this one sees that the
            chief does; to be kept.
        links: a connection to each of the tasks that this one sums up with; empty where TensorFlow does that.
    """

    lifelines: Sequence[socket.socket] = ()
    links: Mapping[TaskId, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """Ends all connections."""
        for connection in (*self.lifelines, *self.links.values()):
            connection.close()


def gather(
    task: TaskId,
    own: Address,
    others: Mapping[TaskId, Address],
    timeout: float,
    circle: Mapping[TaskId, Address] = NOBODY,
) -> RendezvousResult:
    """Waits on the chief until every other task is up and has said hello.

    A server that is up but says nothing for ten seconds is not one of tfdist's, and is taken as it is.

    Args:
        task: this one.
        own: its address.
        others: whom it waits for.
        timeout: seconds for all this.
        circle: the tasks that are to sum up with one another, this one among them, each with the same order. Where one
            has no circle, nobody has.

    Raises:
        TimeoutExceeded: names the tasks that did not come up within `timeout` seconds, and why; one that was refused,
            as for its version of TensorFlow, is not up.
        TrainingError: this task's port is taken.
    """
    deadline = time.monotonic() + timeout
    absence = PendingTasks(others, timeout)
    silent, summing = set(others), {task}
    looked_at, silence = time.monotonic(), 0.0
    with ExitStack() as connections, _listening(task, own) as listener:
        met: list[socket.socket] = []
        reception = connections.enter_context(closing(Reception(listener, others.keys())))
        while absence.look() or (silent and silence < _SILENCE):
            refused = {other: others[other] for other in reception.refused if other in silent}
            passed, looked_at = min(time.monotonic() - looked_at, PERIOD), time.monotonic()
            silence = 0.0 if absence.missing or refused else silence + passed
            if refused and looked_at > deadline:
                raise TimeoutExceeded(
                    pending_tasks(refused, reception.refused, timeout), code="start-timeout", hint=START_HINT
                )
            for connection, hello in reception.arrived(RETRY):
                silent.discard(hello.task)
                if hello.sums:
                    summing.add(hello.task)
                met.append(connections.enter_context(connection))
        together = bool(circle) and summing >= circle.keys()
        for connection in met:
            with suppress(OSError):  # one that has gone again is missed by TensorFlow
                connection.sendall(_GO_TOGETHER if together else _GO)
        links = _linked(task, circle, reception, deadline) if together else {}
        reception.close()
        connections.pop_all()
    return RendezvousResult(met, links)


def report_in(
    task: TaskId,
    own: Address,
    chief: tuple[TaskId, Address],
    timeout: float,
    circle: Mapping[TaskId, Address] = NOBODY,
) -> RendezvousResult:
    """Waits, on a task that trains with the chief, until the chief has gathered all.

    Args:
        task: this one.
        own: its address.
        chief: whom it reports to.
        timeout: seconds for all this.
        circle: as in `gather`.

    Raises:
        TimeoutExceeded: the chief did not come up, or not all of the others, within `timeout` seconds.
        TrainingError: this task's port is taken, the chief has ended, or it refuses this task.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as connections, _listening(task, own) as listener:
        await_up(dict([chief]), timeout)
        told = b""
        try:
            connection = connections.enter_context(
                socket.create_connection((chief[1].host, chief[1].port), timeout=CONNECT)
            )
            connection.settimeout(max(RETRY, deadline - time.monotonic()) + CONNECT)
            if is_ours(greeting := greeting_of(connection)):
                connection.sendall(hello_of(task, greeting, sums=bool(circle)))
                told = line_of(connection)
                check_taken(task, told)
        except TimeoutError:
            raise TimeoutExceeded(pending_tasks({}, {}, timeout), code="start-timeout", hint=START_HINT) from None
        except OSError as error:
            raise _ended(*chief) from error
        if told not in (_GO, _GO_TOGETHER):
            raise _ended(*chief)
        links = {}
        if told == _GO_TOGETHER:
            with closing(Reception(listener, circle.keys())) as reception:
                links = _linked(task, circle, reception, deadline)
        connections.pop_all()
    return RendezvousResult([connection], links)


def _linked(
    task: TaskId, circle: Mapping[TaskId, Address], reception: Reception, deadline: float
) -> dict[TaskId, socket.socket]:
    """Connects a task with all others of its circle, each of which listens: it calls those before it.

    Args:
        task: this one.
        circle: all of them, and their addresses.
        reception: hears those that call.
        deadline: when all this must be done.

    Raises:
        TimeoutExceeded: names who does not call, or does not answer, in time.
        TrainingError: one of them has ended.
    """
    order = list(circle)
    place = order.index(task)
    links: dict[TaskId, socket.socket] = {}
    with ExitStack() as made:
        for other in order[:place]:
            links[other] = made.enter_context(_called(task, other, circle[other], deadline))
        while missing := [other for other in order[place + 1 :] if other not in links]:
            if time.monotonic() > deadline:
                raise TimeoutExceeded(
                    f"{task} hears nothing of {', '.join(map(str, missing))}", code="start-timeout", hint=START_HINT
                )
            for connection, hello in reception.arrived(RETRY):
                if hello.task in missing:
                    links[hello.task] = made.enter_context(connection)
                else:
                    connection.close()
        for link in links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.pop_all()
    return links


def _called(task: TaskId, other: TaskId, address: Address, deadline: float) -> socket.socket:
    """A connection to a task that listens, by which it knows this one."""
    with ExitStack() as made:
        try:
            connection = made.enter_context(socket.create_connection((address.host, address.port), timeout=CONNECT))
            connection.settimeout(max(RETRY, deadline - time.monotonic()))
            greeting = greeting_of(connection)
            connection.sendall(hello_of(task, greeting, sums=True))
        except TimeoutError:
            raise TimeoutExceeded(
                f"{task} gets no answer from {other} at {address}", code="start-timeout", hint=START_HINT
            ) from None
        except OSError as error:
            raise _ended(other, address) from error
        if not is_ours(greeting):
            raise _ended(other, address)
        keep_alive(connection)
        made.pop_all()
    return connection


def _ended(task: TaskId, address: Address) -> TrainingError:
    return TrainingError(
        f"{task} at {address} has ended before the cluster had come together",
        code="task-lost",
        hint=f"{task}'s own output says why; then start all tasks again",
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
        code="port-in-use",
        hint=f"another program may have port {own.port}: end it, or give {task} another address",
    )


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
        TrainingError: it refuses this task.
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
                text = pending_tasks(absent, {_CHIEF: unreachable(chief) or "no answer"}, timeout)
                raise TimeoutExceeded(text, code="start-timeout", hint=START_HINT) from error
            pause.wait(RETRY)  # nothing tells when another host's port opens


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
            TrainingError: the chief refuses this task.
        """
        with socket.create_connection((self._chief.host, self._chief.port), timeout=CONNECT) as connection:
            connection.settimeout(None)
            keep_alive(connection)
            greeting = greeting_of(connection)
            if not greeting:
                raise ConnectionAbortedError("the connection ended without a word")
            self.met = True
            if gathers := is_ours(greeting):
                self.done = False
                connection.sendall(hello_of(self._task, greeting))
            said = b""
            while received := connection.recv(4096):
                said = (said + received)[-4096:]
                if gathers:
                    check_taken(self._task, said)
                self.done = self.done or said.endswith(_DONE)
