"""Exchanges: a worker sends the ps its gradients and asks for their values, when it has need of it.

A worker writes its gradients to its board and sends each ps a *request*. A ps takes one request after another, those of
all workers in the order in which they arrive. It reads the gradients where they are, makes its part of the update,
writes its new values to the same board and sends the worker an *answer*. So the data is written once each way, and no
worker waits for another one's gradients.

A ps knows nothing of a worker but its board, which it hears of in an introduction. If the worker is lost, its answers
find no pipe, or the ps finds no process when it looks: then the ps forgets the board.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from tfdist_cli.train.cluster.shared_memory.boards import Array, Board, OthersBoard, as_numbers, identity_of, key_of
from tfdist_cli.train.cluster.shared_memory.layout import Layout

NUMBERS_OF_ANSWER = 3
_LAST = 1 << 62
"""A turn after all others."""
_GRADIENTS = 0
"""The turn of all gradients. Only values need two halves: a worker may still read those of before."""
_CHECK_SECONDS = 1.0
"""How often a task that waits looks whether the others are still there."""


class NotAnswered(Exception):
    """A ps takes no more requests."""


class Wanted(IntFlag):
    """What a worker wants of the ps; nothing at the end of all exchanges."""

    NOTHING = 0
    UPDATE = 1
    VALUES = 2


class _Message(IntEnum):
    """The first number of a message. Each kind says what the others are."""

    ANSWER = 1
    """to a worker: the ps, the turn, and the numbers of the answer"""
    INTRODUCTION = 2
    """to a ps: the identity of the worker's board"""
    REQUEST = 3
    """to a ps: the key of the worker's board, the turn, what is wanted"""
    END = 4
    """to a ps: whether it closes its boards"""
    LOST = 5
    """from a ps to itself: the key of a worker's board; it follows the worker's last message"""


class WorkerExchange:
    """A worker's side. It makes one exchange after another.

    Args:
        layout: the arrays.
        ps: the identities of all ps, `PsExchanges.identity`.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left; or a board cannot be opened here
            though its ps goes on, see `OthersMemory.of`.

    Attributes:
        is_over: whether there will be no more exchanges.
    """

    def __init__(self, layout: Layout, ps: Sequence[bytes]) -> None:
        self._board = Board(_arrays(layout))
        self._values = _values(layout, 0, len(ps))
        self._key = key_of(self._board.identity)
        self._turn = 0
        self._is_closed = False
        self._used = threading.Lock()
        """Held while the board is used."""
        self._ps: list[OthersBoard] = []
        self._turns = [0] * len(ps)
        """From each ps that of its last answer."""
        self._numbers: Sequence[int] = ()
        """Those of the leader."""
        introduction = _Message.INTRODUCTION, *as_numbers(self._board.identity)
        try:
            for each in ps:
                self._ps.append(OthersBoard(each, []))
            self.is_over = not all(each.pipe.send(*introduction) for each in self._ps)
        except FileNotFoundError:
            self.is_over = True  # a ps has ended, or has closed its board
        except OSError:
            self._close()
            raise

    def request(self, wanted: Wanted, report: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        """Sends gradients to all ps, or none.

        Args:
            wanted: what they are to do.
            report: numbers for the ps.
            gradients: those for the leader first; none unless an update is wanted.
        """
        with self._used:
            self._turn += 1
            self._board.write(_GRADIENTS, [report, *gradients])  # all ps have answered: none reads the last ones
            message = _Message.REQUEST, self._key, self._turn, wanted
            self.is_over = self.is_over or not all(each.pipe.send(*message) for each in self._ps)

    def answer(self) -> tuple[Sequence[int], list[np.ndarray]]:
        """Waits for the answers to the last request.

        Returns:
            The leader's numbers, and the values of all ps. They stay as they are until the answer after the next one.

        Raises:
            NotAnswered: there will be none.
        """
        with self._used:
            while not self.is_over and any(turn < self._turn for turn in self._turns):
                self._receive()
        if self.is_over:
            raise NotAnswered("a ps has ended")
        return self._numbers, self._board.read(self._turn)[self._values]

    def close_if_ended(self) -> bool:
        """Closes the board if a ps takes no more requests and nothing uses it; returns whether it is closed."""
        if not self._used.acquire(blocking=False):
            return False
        try:
            self.is_over = self.is_over or any(each.has_ended for each in self._ps)
            if self.is_over:
                self._close()
        finally:
            self._used.release()
        return self.is_over

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._board.close()
        for each in self._ps:
            each.close()

    def _receive(self) -> None:
        message = self._board.pipe.receive(_CHECK_SECONDS)
        if message is None:
            self.is_over |= any(each.has_ended for each in self._ps)
        elif message[0] == _Message.ANSWER:
            _, ps, turn, *numbers = message
            self._turns[ps] = turn
            self._numbers = self._numbers if ps else numbers[:NUMBERS_OF_ANSWER]
            self.is_over |= turn == _LAST


@dataclass(frozen=True)
class Request:
    """What a ps has to do.

    Args:
        wanted: what.
        report: the worker's numbers.
        gradients: the worker's, for this ps.
    """

    wanted: Wanted
    report: np.ndarray
    gradients: Sequence[np.ndarray]


class PsExchanges:
    """A ps's side: it answers each request before it takes the next one.

    Args:
        number: of the ps; 0 is the leader.
        layout: the arrays.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left.

    Attributes:
        identity: what workers need to send requests, `IDENTITY_BYTES` bytes.
        is_closed: whether it takes no more requests.
    """

    def __init__(self, number: int, layout: Layout) -> None:
        self._number, self._layout = number, layout
        self._gradients = layout.part(number)
        self._first = _values(layout, number, number + 1).start
        self._own = Board([])
        self.identity = self._own.identity
        self._workers: dict[int, OthersBoard] = {}
        """Their boards by the keys."""
        self.is_closed = False
        self._looked = time.monotonic()
        """When it last looked whether the workers are still there."""
        self._asked: tuple[int, int, Wanted] | None = None
        """The request that is to be answered: the key, the turn, and what is wanted."""

    def take(self) -> Request:
        """Waits for the next request; after `end` there is one for nothing."""
        while True:
            message = self._own.pipe.receive(_CHECK_SECONDS)
            self._look_for_lost()
            if message is None:
                continue
            if message[0] == _Message.LOST:
                self._forget(message[1])
            elif message[0] == _Message.END:
                if message[1]:
                    self.close()
                return Request(Wanted.NOTHING, np.zeros(self._layout.report.size), self._no_gradients)
            elif message[0] == _Message.INTRODUCTION:
                self._introduce(identity_of(message[1:]))
            elif message[0] == _Message.REQUEST and message[1] in self._workers:
                _, key, turn, wanted, *_ = message
                self._asked = key, turn, Wanted(wanted)
                arrays = self._workers[key].read(_GRADIENTS)
                return Request(Wanted(wanted), arrays[0], arrays[self._gradients])

    def answer(self, numbers: Sequence[int], values: Sequence[np.ndarray]) -> None:
        """Answers the request that was taken, if there was one.

        Args:
            numbers: `NUMBERS_OF_ANSWER` numbers for the worker; it looks at those of the leader.
            values: of the variables, which are sent if they are wanted.
        """
        if self._asked is None:
            return
        (key, turn, wanted), self._asked = self._asked, None
        worker = self._workers[key]
        if Wanted.VALUES in wanted:
            worker.write(turn, values, first=self._first)
        if not worker.pipe.send(_Message.ANSWER, self._number, turn, *numbers):
            self._forget(key)

    def end(self, *, closes: bool) -> None:
        """Lets `take` return, and close the boards if it is told to; another thread may call it."""
        if not self.is_closed:
            self._own.pipe.send(_Message.END, closes)

    def close(self) -> None:
        """Lets workers that wait know that there will be no answer, and closes the boards. `take` may not wait."""
        if self.is_closed:
            return
        self.is_closed = True
        self._own.end()
        for worker in self._workers.values():
            worker.pipe.send(_Message.ANSWER, self._number, _LAST)
            worker.close()
        self._workers.clear()
        self._own.close()

    @property
    def _no_gradients(self) -> list[np.ndarray]:
        return [np.zeros(array.size, array.dtype) for array in self._layout.gradients[self._number]]

    def _introduce(self, identity: bytes) -> None:
        try:
            self._workers[key_of(identity)] = OthersBoard(identity, _arrays(self._layout))
        except FileNotFoundError:
            return  # it was lost: its next process introduces itself

    def _look_for_lost(self) -> None:
        """Finds workers that are lost. Each is forgotten after its last request, which the other ps take, too."""
        now = time.monotonic()
        if now - self._looked < _CHECK_SECONDS:
            return
        self._looked = now
        for key in [key for key, worker in self._workers.items() if worker.has_ended]:
            self._own.pipe.send(_Message.LOST, key)

    def _forget(self, key: int) -> None:
        worker = self._workers.pop(key, None)
        if worker:
            worker.close()


def _arrays(layout: Layout) -> list[Array]:
    """The arrays of a worker's board: what it writes, then what each ps does."""
    return [*layout.of_worker, *(array for own in layout.values for array in own)]


def _values(layout: Layout, first: int, end: int) -> slice:
    """Which arrays of a worker's board are the values of some ps."""
    sizes = [len(own) for own in layout.values]
    begin = len(layout.of_worker) + sum(sizes[:first])
    return slice(begin, begin + sum(sizes[first:end]))
