"""Rounds: in each one, all workers of a host send the ps an array each, and the ps send all workers new ones.

A round has a *sequence number*. In it a worker writes its gradients to its board and sends the first ps, the leader, a
commit. The leader waits for those of all workers and tells the other ps whose they are, so that all ps take the same
ones. Each ps then reads the workers' boards, makes its part of the update, writes the new values to its own board and
sends all workers a *token*: the next round begins. So a message is sent when there is something to do, and the data is
written once.

A worker that is started again introduces itself to all ps. Each ps answers with its last token, and the leader drops
what the worker had committed for the round that is on: an update takes a worker's gradient on all ps or on none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tfdist_cli.train.cluster.shared_memory.boards import Board, OthersBoard, as_numbers, identity_of, key_of
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.pipes import NUMBERS

END = -1
"""The kind of a token after which there is no round."""
_LAST = 1 << 62
"""A sequence number after all others."""
_CHECK_SECONDS = 1.0
"""How often a task that waits looks whether the others are still there."""


class _Message(IntEnum):
    """The first number of a message. Each kind says what the others are."""

    TOKEN = 1
    """to a worker: the ps, the sequence number, the kind"""
    INTRODUCTION = 2
    """to a ps: the worker, the identity of its board"""
    COMMIT = 3
    """to the leader: the worker, the sequence number, the key of its board"""
    TAKE = 4
    """from the leader to another ps: the sequence number, how many keys follow, the keys of some workers' boards"""
    ABORT = 5
    """to a ps"""


_KEYS = NUMBERS - 3
"""The keys in a message `TAKE`."""


class Aborted(Exception):
    """There will be no more rounds, as the run was aborted."""


class WorkerRounds:
    """A worker's side of a run.

    Args:
        worker: its number.
        layout: the arrays.
        ps: the identities of the boards of all ps.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left; or a board cannot be opened here
            though the run may go on, see `OthersMemory.of`.
    """

    def __init__(self, worker: int, layout: Layout, ps: Sequence[bytes]) -> None:
        self._worker = worker
        self._board = Board(layout.of_worker)
        self._key = key_of(self._board.identity)
        self._layout = layout
        self._ps: list[OthersBoard] = []
        self._tokens = [(-1, END)] * len(ps)
        self._is_closed = False
        self._used = threading.Lock()
        """Held while the boards are used: a function of before may be called beside the next one."""
        introduction = _Message.INTRODUCTION, worker, *as_numbers(self._board.identity)
        try:
            for each, arrays in zip(ps, layout.values, strict=True):
                self._ps.append(OthersBoard(each, arrays))
            self._is_over = not all(each.pipe.send(*introduction) for each in self._ps)
        except FileNotFoundError:
            self._is_over = True  # a ps has closed its board, or has ended
        except OSError:
            self._close()
            raise

    def write(self, sequence: int, gradients: Sequence[np.ndarray]) -> None:
        """Writes the gradients of a round, those for the leader first."""
        with self._used:
            if not self._is_over:
                self._board.write(sequence, gradients, first=1)

    def commit(self, sequence: int, report: np.ndarray, gradients: Sequence[np.ndarray] = ()) -> None:
        """Commits the gradients of a round, unless they are written already."""
        with self._used:
            if not self._is_over:
                self._board.write(sequence, [report, *gradients])
                sent = self._ps[0].pipe.send(_Message.COMMIT, self._worker, sequence, self._key)
                self._is_over = not sent

    def await_round(self, sequence: int) -> tuple[int, int, list[np.ndarray]]:
        """Waits until a round, or a later one, may begin on each ps.

        Args:
            sequence: its sequence number.

        Returns:
            The sequence number; the kind of the leader's token; and the arrays of all ps. If there is no such round the
            kind is `END`, the arrays are of no use, and the boards are closed.
        """
        with self._used:
            while not self._is_over and not self._may_begin(sequence):
                self._receive()
            if not self._is_over and self._tokens[0][1] != END:
                found, kind = self._tokens[0]
                return found, kind, [array for each in self._ps for array in each.read(found)]
            self._close()
        return sequence, END, arrays_of_no_use(self._layout)

    def close_if_over(self) -> bool:
        """Closes the boards of a run that is over, if nothing uses them just now: its function has failed.

        Returns:
            Whether they are closed.
        """
        if self._used.acquire(blocking=False):
            try:
                if self._is_over or any(each.has_ended for each in self._ps):
                    self._close()
            finally:
                self._used.release()
        return self._is_closed

    def _receive(self) -> None:
        message = self._board.pipe.receive(_CHECK_SECONDS)
        if message is None:
            self._is_over = any(each.has_ended for each in self._ps)
        elif message[0] == _Message.TOKEN:
            self._tokens[message[1]] = message[2], message[3]

    def _may_begin(self, sequence: int) -> bool:
        return self._tokens[0][0] >= sequence and len({each for each, _ in self._tokens}) == 1

    def _close(self) -> None:
        self._is_over = True
        if self._is_closed:
            return
        self._is_closed = True
        self._board.close()
        for each in self._ps:
            each.close()
        self._ps.clear()


def arrays_of_no_use(layout: Layout) -> list[np.ndarray]:
    """Returns arrays like those of all ps, for a round that there is not."""
    return [np.zeros(each.size, each.dtype) for own in layout.values for each in own]


@dataclass
class _Member:
    """A worker as a ps knows it.

    Args:
        board: its board.
        key: the key of its board.
        before: the boards of its processes of before, by their keys: they may be read until the round is over.
    """

    board: OthersBoard
    key: int
    before: dict[int, OthersBoard]


class PsRounds:
    """A ps's side of a run.

    Args:
        number: of the ps; 0 is the leader.
        workers: how many workers there are.
        layout: the arrays.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left.

    Attributes:
        identity: that of its board.
    """

    def __init__(self, number: int, workers: int, layout: Layout) -> None:
        self._number, self._layout = number, layout
        self._board = Board(layout.values[number])
        self.identity = self._board.identity
        self._workers: list[_Member | None] = [None] * workers
        self._committed: dict[int, int] = {}
        """On the leader: the sequence numbers that workers have committed last."""
        self._taken: dict[int, list[int]] = {}
        """On other ps: the keys of the workers' boards, by the sequence number of the round."""
        self._followers: list[OthersBoard] = []
        self._last: tuple[int, int] | None = None
        """The last token."""
        self._used = threading.Lock()
        """Held while the boards are used, but for `abort`."""

    def begin(self, ps: Sequence[bytes]) -> None:
        """Opens the boards of the other ps, on the leader."""
        if not self._number:
            boards = zip(ps[1:], self._layout.values[1:], strict=True)
            self._followers = [OthersBoard(each, arrays) for each, arrays in boards]

    def publish(self, sequence: int, kind: int, values: Sequence[np.ndarray]) -> None:
        """Lets a round begin on this ps, with new values.

        Args:
            sequence: its sequence number.
            kind: that of the token.
            values: the first arrays; the others stay as they were. In the first round of a run, all of them.
        """
        with self._used:
            self._board.write(sequence, values)
            if self._last is None:
                self._board.write(sequence + 1, values)
            self._last = sequence, kind
            for worker in self._members():
                for board in worker.before.values():
                    board.close()
                worker.before.clear()
                self._send_token(worker, self._last)

    def collect(self, sequence: int) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Waits until all workers have committed gradients for a round.

        Args:
            sequence: its sequence number.

        Returns:
            The reports, on the leader, shape (workers, numbers); and each worker's arrays.

        Raises:
            Aborted: the run was aborted.
        """
        workers = range(len(self._workers))
        with self._used:
            keys = self._taken_keys(sequence) if self._number else self._committed_keys(sequence)
            read = [self._board_of(worker, key).read(sequence) for worker, key in zip(workers, keys, strict=True)]
        part = self._layout.part(self._number)
        return np.stack([arrays[0] for arrays in read]), [arrays[part] for arrays in read]

    def _committed_keys(self, sequence: int) -> list[int]:
        """Waits on the leader for commits; tells the other ps whose they are."""
        while any(self._committed.get(worker) != sequence for worker in range(len(self._workers))):
            self._receive()
        keys = [worker.key for worker in self._members()]
        for begin in range(0, len(keys), _KEYS):
            own = keys[begin : begin + _KEYS]
            for follower in self._followers:
                follower.pipe.send(_Message.TAKE, sequence, len(own), *own)
        return keys

    def _taken_keys(self, sequence: int) -> list[int]:
        """Waits on another ps for what the leader takes."""
        while len(self._taken.get(sequence, ())) < len(self._workers):
            self._receive()
        return self._taken.pop(sequence)

    def abort(self) -> None:
        """Ends the run: workers get no more tokens, and `collect` fails."""
        self._board.end()
        self._board.pipe.send(_Message.ABORT)
        for worker in self._members():
            self._send_token(worker, (_LAST, END))

    def close_if_aborted(self) -> bool:
        """Closes the boards of a run that was aborted, if nothing uses them just now; returns whether it has."""
        if not self._board.has_ended or not self._used.acquire(blocking=False):
            return False
        try:
            self.close()
        finally:
            self._used.release()
        return True

    def close(self) -> None:
        """Closes the boards. Workers that introduce themselves later find none."""
        self._board.end()
        self._board.close()
        opened = [board for worker in self._members() for board in (worker.board, *worker.before.values())]
        for each in [*self._followers, *opened]:
            each.close()

    def _members(self) -> list[_Member]:
        return [worker for worker in self._workers if worker]

    def _receive(self) -> None:
        message = self._board.pipe.receive(_CHECK_SECONDS)
        if message is None:
            return
        kind, *numbers = message
        if kind == _Message.ABORT:
            raise Aborted
        if kind == _Message.INTRODUCTION:
            self._introduce(numbers[0], identity_of(numbers[1:]))
        elif kind == _Message.COMMIT:
            worker, sequence, key = numbers[:3]
            member = self._workers[worker]
            if member and member.key == key:
                self._committed[worker] = sequence
        elif kind == _Message.TAKE:
            sequence, count, *keys = numbers
            self._taken.setdefault(sequence, []).extend(keys[:count])

    def _introduce(self, worker: int, identity: bytes) -> None:
        try:
            board = OthersBoard(identity, self._layout.of_worker)
        except FileNotFoundError:
            return  # it was killed: the next process introduces itself
        earlier = self._workers[worker]
        before = {**earlier.before, earlier.key: earlier.board} if earlier else {}
        self._workers[worker] = member = _Member(board, key_of(identity), before)
        self._committed.pop(worker, None)
        if self._last:
            self._send_token(member, self._last)

    def _send_token(self, worker: _Member, token: tuple[int, int]) -> None:
        worker.board.pipe.send(_Message.TOKEN, self._number, *token)  # a worker that is lost is started again

    def _board_of(self, worker: int, key: int) -> OthersBoard:
        """The board that a worker has committed, or its process of before: it introduced itself to all ps before."""
        while True:
            member = self._workers[worker]
            boards = {**member.before, member.key: member.board} if member else {}
            if key in boards:
                return boards[key]
            self._receive()
