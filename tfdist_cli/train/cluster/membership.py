"""Which workers take part in a training that runs: those of the start, others that join it, and less those that leave.

The chief of a parameter server cluster may listen at a join address beside its own, which TensorFlow's server uses. A
worker connects there, identifies itself by the handshake of all tasks (`handshake`), and asks to `join` or to `leave`.
A data worker does so, too; it leaves in two steps, and says when it has `left`.
The answer is `go`, or `refused` with a reason. The connection of a worker that has joined stays open as long as the
chief lives, like those of the rendezvous.

`Membership` is the state, without sockets and without TensorFlow. The engine of the training takes requests from it,
acts, and reports what it has done. While no training runs, a worker that leaves does so at once.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal, Protocol

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import LEAVE_SIGNAL
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.handshake import (
    PERIOD,
    HandshakeListener,
    Hello,
    check_accepted,
    enable_keepalive,
    hello_message,
    is_greeting,
    receive_greeting,
    receive_line,
)
from tfdist_cli.train.cluster.reachability import CONNECT
from tfdist_cli.train.cluster.rendezvous import DONE, listen

JOIN, LEAVE, LEFT = "join", "leave", "left"
LEAVE_SECONDS = 30.0
"""Seconds that a leaving worker waits for its last step to be counted."""
_GO = b"go\n"
_REFUSED = b"refused "
log = logging.getLogger("tfdist")


class JoinRefused(TrainingError):
    """The chief does not take this worker."""

    retry = False


@dataclass(frozen=True)
class Refusal:
    """Why a worker must not join or leave.

    Args:
        reason: the message.
        code: its stable name.
        hint: what to do about it.
    """

    reason: str
    code: str
    hint: str = ""


@dataclass(eq=False)
class Request:
    """What a worker asks.

    Args:
        task: the worker.
        address: its address.
        asks: `JOIN`, `LEAVE` or `LEFT`.
        at: when it asked, monotonic seconds.
    """

    task: TaskId
    address: Address
    asks: str
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Answer:
    """The answer to a request: it is granted, unless there is a refusal."""

    refusal: Refusal | None = None


GRANTED = Answer()


class Members(Protocol):
    """Who answers the requests of the tasks of a role."""

    def ask(self, request: Request) -> Answer | None:
        """Returns the answer to a request; None if it comes later."""

    def withdraw(self, request: Request) -> None:
        """The task that asked is gone."""


class Membership:
    """The workers of a cluster, and what others ask.

    All methods may be called by any thread.

    Args:
        members: the workers of the start, and their addresses.
        most: there are only workers with an index below this.

    Attributes:
        requests: those that the training has to act on, in order; None when it ends. Each training has its own.
        answered: called with each of these, and the answer.
    """

    def __init__(self, members: Mapping[TaskId, Address], most: int) -> None:
        self.most = most
        self.requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.answered: Callable[[Request, Answer], None] = lambda _request, _answer: None
        self._members = dict(members)
        self._pending: dict[TaskId, Request] = {}
        self._refusal: Refusal | None = None
        self._training: Literal["no", "starts", "runs"] = "no"
        self._lock = threading.Lock()

    @property
    def members(self) -> Mapping[TaskId, Address]:
        """The workers now, and their addresses."""
        with self._lock:
            return dict(self._members)

    def start(self) -> None:
        """A training is about to begin: whoever asks to leave waits for it, like those that ask to join."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        self._training, self._refusal, self.requests = "starts", None, queue.SimpleQueue()
        for request in self._pending.values():
            self.requests.put(request)

    def begin(self, refusal: Refusal | None) -> None:
        """A training begins.

        Args:
            refusal: why no worker may join it or leave it; None if they may.
        """
        with self._lock:
            if self._training == "no":
                self._start()
            self._training, self._refusal = "runs", refusal
            refused = list(self._pending.values()) if refusal else []
        for request in refused:
            self.refuse(request, refusal)

    def end(self) -> None:
        """The training has ended: workers that leave do so, and those that ask to join wait for the next one."""
        with self._lock:
            self._training, self._refusal = "no", None
            self.requests.put(None)
            leaving = [request for request in self._pending.values() if request.asks == LEAVE]
        for request in leaving:
            if len(self.members) > 1:
                self.grant(request)
            else:
                self.refuse(request, last_worker(request.task))

    def ask(self, request: Request) -> Answer | None:
        """Returns the answer to a request; None if the training has to act first, see `answered`."""
        with self._lock:
            answer = self._answer_to(request)
            if answer is None:
                self._pending[request.task] = request
                if self._training != "no":
                    self.requests.put(request)
            return answer

    def _answer_to(self, request: Request) -> Answer | None:
        task, known = request.task, self._members.get(request.task)
        if request.asks == LEAVE:
            return self._answer_to_leave(task)
        if task.index >= self.most:
            return Answer(
                Refusal(
                    f"the cluster has at most {self.most} workers, and {task} would be one more",
                    code="cluster-full",
                    hint="raise roles.worker.max in the cluster file, and launch again",
                )
            )
        if known is not None and known != request.address:
            return Answer(
                Refusal(
                    f"there is a {task} at {known}, and another one at {request.address} asks to join",
                    code="task-exists",
                    hint="give the new worker an index that is free, or end the other one",
                )
            )
        if known is not None:
            return GRANTED
        return Answer(self._refusal) if self._refusal else None

    def _answer_to_leave(self, task: TaskId) -> Answer | None:
        if task not in self._members:
            if self._pending.pop(task, None):
                log.info("%s does not join after all", task)
            return GRANTED
        if len(self._members) == 1:
            return Answer(last_worker(task))
        if self._training == "no":
            del self._members[task]
            log.info("%s has left while no training runs", task)
            return GRANTED
        return Answer(self._refusal) if self._refusal else None

    def is_pending(self, request: Request) -> bool:
        """Whether a worker still waits for the answer to this request.

        A worker that asks again may be another process, which has nothing of what was prepared for the first one.
        """
        with self._lock:
            return self._pending.get(request.task) is request

    def withdraw(self, request: Request) -> None:
        """The worker that asked is gone. If it asked to join, it does not; if it asked to leave, it has to."""
        with self._lock:
            if self._pending.get(request.task) is request and request.asks == JOIN:
                del self._pending[request.task]

    def grant(self, request: Request) -> None:
        """The worker has joined, or left."""
        with self._lock:
            if request.asks == JOIN:
                self._members[request.task] = request.address
            else:
                self._members.pop(request.task, None)
            pending = self._pending.get(request.task)
            if pending and pending.asks == request.asks:
                del self._pending[request.task]
        self.answered(pending if pending and pending.asks == request.asks else request, GRANTED)

    def refuse(self, request: Request, refusal: Refusal | None) -> None:
        """The worker does not join, or does not leave. If it has asked again, that request stays."""
        with self._lock:
            if self._pending.get(request.task) is request:
                del self._pending[request.task]
        self.answered(request, Answer(refusal))


def last_worker(task: TaskId) -> Refusal:
    """Returns the refusal of the only worker that could leave."""
    return Refusal(
        f"{task} is the last worker", code="last-worker", hint="end the training by its launcher or its chief"
    )


Requests = queue.SimpleQueue[Request | None]


def next_request(requests: Requests, timeout: float) -> Request | None:
    """Returns the next request that a training has to act on; None if none comes in time, or it ends.

    Args:
        requests: the training's.
        timeout: seconds to wait.
    """
    try:
        request = requests.get(timeout=timeout)
    except queue.Empty:
        return None
    if request is None:
        requests.put(None)  # for the one who waits without a timeout
    return request


class JoinListener:
    """Listens at the join address, in a thread, for as long as the process lives.

    Args:
        chief: this task.
        address: the join address.
        membership: answers the requests of workers.
        data_workers: answers those of data workers.

    Raises:
        TrainingError: the port is in use.
    """

    def __init__(
        self, chief: TaskId, address: Address, membership: Membership, data_workers: Members | None = None
    ) -> None:
        self._membership = membership
        self._data_workers = data_workers
        self._held: dict[socket.socket, Request] = {}
        """Connections of workers that wait, or that have joined; of any thread, one operation at a time."""
        self._handshakes = HandshakeListener(listen(chief, address), _MayConnect(membership, data_workers))
        membership.answered = self._answer
        threading.Thread(target=self._run, name="tfdist-joins", daemon=True).start()

    def announce_done(self) -> None:
        """Tells the workers that have joined that the chief exits because its work is done."""
        for connection in list(self._held):
            _send(connection, DONE)

    def _run(self) -> None:
        while True:
            for connection, hello in self._handshakes.identified(PERIOD):
                self._receive(connection, hello)
            for connection, request in list(self._held.items()):
                if _is_closed(connection):
                    del self._held[connection]
                    connection.close()
                    self._members_like(request.task).withdraw(request)

    def _receive(self, connection: socket.socket, hello: Hello) -> None:
        try:
            request = Request(hello.task, Address.parse(hello.address), hello.asks)
        except ValueError:
            connection.close()
            return
        self._held[connection] = request
        answer = self._members_like(request.task).ask(request)
        if answer:
            self._answer(request, answer)

    def _members_like(self, task: TaskId) -> Members:
        if self._data_workers and task.traits.prepares_data:
            return self._data_workers
        return self._membership

    def _answer(self, request: Request, answer: Answer) -> None:
        refusal = answer.refusal
        for connection in [connection for connection, held in list(self._held.items()) if held is request]:
            if refusal is None:
                _send(connection, _GO)
            else:
                content = {"reason": refusal.reason, "code": refusal.code, "hint": refusal.hint}
                _send(connection, _REFUSED + json.dumps(content).encode() + b"\n")


class _MayConnect:
    """The tasks that may connect: workers and data workers, whatever their index, since a refusal tells them more."""

    def __init__(self, membership: Membership, data_workers: Members | None) -> None:
        self._roles = {task.role for task in membership.members}
        self._data = data_workers is not None

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, TaskId):
            return False
        return task.role in self._roles or (self._data and task.traits.prepares_data)


def _send(connection: socket.socket, line: bytes) -> None:
    with suppress(OSError):  # that worker has exited
        connection.sendall(line)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def hold(task: TaskId, own: Address, join_address: Address, joined: Callable[[], None] = lambda: None) -> bool:
    """Joins a chief that trains, on a worker, and returns when the connection is closed.

    Args:
        task: the worker.
        own: its address.
        join_address: where the chief listens.
        joined: called when the chief has taken the worker.

    Returns:
        Whether the chief announced that its work is done.

    Raises:
        JoinRefused: the chief does not take this worker.
        OSError: there is no such chief, or the connection broke.
    """
    with _asking(task, own, join_address, JOIN) as connection:
        connection.settimeout(None)
        first, end, tail = receive_line(connection).partition(b"\n")  # the chief may be done at once
        _check_granted(task, first + end)
        joined()
        while received := connection.recv(4096):
            tail = (tail + received)[-4096:]
        return tail.endswith(DONE)


def leave(task: TaskId, own: Address, join_address: Address, timeout: float = LEAVE_SECONDS, asks: str = LEAVE) -> bool:
    """Asks the chief to let a task go; returns whether it does: the last step of a worker is counted then.

    Args:
        task: the task that leaves.
        own: its address.
        join_address: where the chief takes such requests.
        timeout: seconds to wait for the answer.
        asks: the request: `LEAVE`, or another one that the chief grants.
    """
    try:
        with _asking(task, own, join_address, asks) as connection:
            connection.settimeout(timeout)
            _check_granted(task, receive_line(connection))
    except (OSError, TrainingError) as error:
        log.info("%s cannot leave the training in order: %s", task, error)
        return False
    return True


@contextmanager
def _asking(task: TaskId, own: Address, join_address: Address, asks: str) -> Iterator[socket.socket]:
    with socket.create_connection((join_address.host, join_address.port), timeout=CONNECT) as connection:
        enable_keepalive(connection)
        greeting = receive_greeting(connection)
        if not is_greeting(greeting):
            raise ConnectionAbortedError("no chief listens at the join address")
        connection.sendall(hello_message(task, greeting, asks=asks, address=str(own)))
        yield connection


def _check_granted(task: TaskId, answer: bytes) -> None:
    check_accepted(task, answer)
    if answer.startswith(_REFUSED):
        refusal = json.loads(answer.removeprefix(_REFUSED))
        raise JoinRefused(refusal["reason"], code=refusal["code"], hint=refusal["hint"] or None)
    if answer != _GO:
        raise ConnectionAbortedError("the chief closed the connection")


class SigtermReceived(BaseException):
    """SIGTERM, `LEAVE_SIGNAL` or Ctrl-C interrupted this process's wait.

    Args:
        number: the signal.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raises `SigtermReceived` in the main thread within the context.

    Ctrl-C has the same effect as SIGTERM, unless it is ignored, as in the background of a shell. Where SIGTERM is
    ignored, since all tasks get it at once, `LEAVE_SIGNAL` has this effect in its place. In another thread, Python
    installs no handlers, and the signals do what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    numbers = [LEAVE_SIGNAL if ignored else signal.SIGTERM]
    numbers += [] if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else [signal.SIGINT]
    previous = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        restore()
        raise SigtermReceived(number)

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        restore()


def end_by_sigterm(number: int = signal.SIGTERM) -> None:
    """Does what a signal does without `interrupted_by_sigterm`; where SIGTERM is ignored, it ends the process.

    Args:
        number: the signal that was received; `LEAVE_SIGNAL` stands for SIGTERM.
    """
    if number == signal.SIGINT:
        os.kill(os.getpid(), number)
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
