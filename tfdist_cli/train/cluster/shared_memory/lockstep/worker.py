"""A worker's side of steps that workers take together, see `memory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tfdist_cli.train.cluster.shared_memory.lockstep.factors import OwnFactors
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import (
    ABORTED,
    ALLOWED,
    BEGUN,
    COMMITTED,
    COUNT,
    END,
    FIRST,
    LATER,
    REPORTED,
    SAVED,
    UPDATED,
    UPDATING,
    WANTED,
    Content,
    StepLayout,
)
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, OthersMemory, has_ended
from tfdist_cli.train.cluster.shared_memory.stored import aligned_bytes, is_at

_NOTHING = LATER
"""In place of the sequence number of an update that is made again."""
IS_OVER, MAY_BEGIN = -1, 1
"""The kinds of a step: there is none, or it may begin. A larger number than the latter: so many steps may be taken."""
_CHECK_SECONDS = 1.0
"""How often a worker that waits looks whether the others are still there."""
Watch = Callable[[dict[int, float], Callable[[], bool]], bool]
"""Looks whether those that a worker waits for have ended. Its arguments: something, at first empty, for it to remember
something in while the worker waits; and whether the worker waits still."""


class _Over(Exception):
    """There are no more steps in this run."""


class WorkerSteps:
    """What a worker has of the memory of all ps.

    Args:
        worker: its number.
        layout: of all ps.
        identities: of all ps, `PsSteps.identity`.
        have_ended: looks whether there will be no more steps; by default, whether a ps has ended.

    Raises:
        OSError: the memory of a ps cannot be opened here though the ps goes on, see `OthersMemory.of`.

    Attributes:
        is_over: whether there are no more steps, in this run and in later ones.
    """

    def __init__(
        self, worker: int, layout: StepLayout, identities: Sequence[bytes], have_ended: Watch | None = None
    ) -> None:
        self._worker, self._layout = worker, layout
        self._have_ended = have_ended or (lambda *_: any(map(has_ended, self._processes)))
        self._processes: list[int] = []
        self._ps: list[Content] = []
        self.is_over = False
        try:
            for ps, identity in enumerate(identities):
                memory = OthersMemory.of(identity)
                content = memory.first(ALIGNED + Content.bytes(layout, ps))[ALIGNED:]
                self._processes.append(memory.process)
                self._ps.append(Content(content, layout, ps))
        except FileNotFoundError:
            self.is_over = True  # a ps has ended, or has closed its memory
            self._ps = [Content(_zeros(Content.bytes(layout, ps)), layout, ps) for ps in range(len(identities))]
        self._replayed = _NOTHING
        # Views are made once: to make them costs as much as to copy a small array.
        self._terms = [self._parts(own.gradients, ps) for ps, own in enumerate(self._ps)]
        self._written = [place for own in self._ps for place in own.gradient_of[worker]]
        self._reports = list(self._ps[0].reports[worker])
        factors = [each for ps in range(len(self._ps)) for each in layout.factors_on(ps).values()]
        turns = range(layout.kept_means)
        self._means = [[self._parts(own.means, ps)[turn] for ps, own in enumerate(self._ps)] for turn in turns]
        all_factors = [[places for own in self._ps for places in own.factors[turn]] for turn in turns]
        self._received = [
            [*means, *(each for own in found for each in (own.firsts[worker], own.second))]
            for means, found in zip(self._means, all_factors, strict=True)
        ]
        """What `gradients` returns."""
        self._own_factors = [
            [OwnFactors(*each, worker) for each in zip(factors, own, strict=True)] for own in all_factors
        ]
        self._saved = [
            pair for ps, own in enumerate(self._ps) for pair in zip(self._values(ps), self._saved_of(ps), strict=True)
        ]

    @property
    def places(self) -> list[np.ndarray]:
        """Of each ps the parameters and the state; then the worker's part of all parameters, and of their slots.

        The parts have some values behind them: first that of the parameters without factors, then some rows of each
        matrix. All are zeros in memory of this worker if a ps has ended.
        """
        more = ALIGNED // self._layout.dtype.itemsize
        return [
            each for ps, own in enumerate(self._ps) for each in (*own.parameters, *own.state, *self._values(ps, more))
        ]

    def check_places(self, values: Sequence[np.ndarray]) -> None:
        """Raises an error if some values, of the parts of all ps, are not those in the memory."""
        parts = [each for ps in range(len(self._ps)) for each in self._values(ps)]
        if not self.is_over and not all(is_at(value, part) for value, part in zip(values, parts, strict=True)):
            raise RuntimeError("a variable of a worker has left the memory of its ps")

    def begin(self, first: int) -> tuple[int, int]:
        """Waits until a worker's first step may begin, or that of a worker that was started again.

        Args:
            first: the sequence number of the first step of the run.

        Returns:
            The sequence number; and `IS_OVER`, or how many steps may be taken, `MAY_BEGIN` for one. The step may be one
            whose gradients are committed.
        """
        self._replayed = _NOTHING
        try:
            for each in self._ps:
                # The first numbers of two runs may have the same low half, for which a process would go on waiting.
                self._await(each.numbers, BEGUN, LATER, until=partial(_has_begun, each.numbers, first))
            if self._ps[0].numbers[FIRST] != first:
                return first, IS_OVER
            own = self._own
            if own[COMMITTED] > own[UPDATED]:
                if own[UPDATING] > own[UPDATED]:
                    self._restore()
                return own[COMMITTED], MAY_BEGIN
        except _Over:
            return first, IS_OVER
        return self._next()

    def commit(self, sequence: int, report: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        """Commits the gradients of a step, unless they are.

        Args:
            sequence: the step's.
            report: its report.
            gradients: of the parameters of all ps without factors, then the two factors of each other one.
        """
        if self.is_over or self._own[COMMITTED] >= sequence:
            return
        whole, factors = gradients[: len(self._written)], gradients[len(self._written) :]
        for place, gradient in zip(self._written, whole, strict=True):
            np.copyto(place, gradient.reshape(-1))
        own = self._own_factors[sequence % len(self._own_factors)]
        for places, first, second in zip(own, factors[::2], factors[1::2], strict=True):
            places.write(first, second)
        np.copyto(self._reports[sequence % self._layout.kept], report)
        self._own.store(COMMITTED, sequence)

    def replay(self) -> tuple[int, bool, list[np.ndarray]]:
        """Returns an update that is to be made again before the first step, of a part that was restored.

        Returns:
            How many updates there were before it; whether there is one; and the means of the gradients, see
            `gradients`: of no use otherwise.
        """
        sequence = self._replayed
        if sequence >= self._own[COMMITTED]:
            return 0, False, self._received[0]
        self._replayed += 1
        return self._count(sequence), True, self._received[sequence % len(self._received)]

    def gradients(self, sequence: int) -> tuple[int, list[np.ndarray]]:
        """Waits until all workers have committed the gradients of a step.

        Args:
            sequence: the step's.

        Returns:
            How many updates there were before; and the means of the worker's part of the gradients of each ps, then for
            each matrix the two factors of the mean of the worker's rows. If the run is over, both are of no use, as
            what they update.
        """
        turn = sequence % len(self._means)
        means, received = self._means[turn], self._received[turn]
        try:
            for each in self._ps[0].workers:
                self._await(each, COMMITTED, sequence)
        except _Over:
            return 0, received
        for terms, mean in zip(self._terms, means, strict=True):
            _write_mean(terms, mean)
        if not self._worker:
            self._assign_state(sequence)
        if sequence - self._own[SAVED] >= len(self._means):
            for place, saved in self._saved:
                np.copyto(saved, place)
            self._own.store(SAVED, sequence)
        self._own.store(UPDATING, sequence)
        return self._count(sequence), received

    def finish(self, sequence: int) -> tuple[int, int]:
        """Tells that the worker's part is updated, and waits until the next step may begin; see `begin`."""
        if self.is_over:
            return sequence, IS_OVER
        self._own.store(UPDATED, sequence)
        if sequence >= self._ps[0].numbers[WANTED]:
            self._own.store(REPORTED, sequence)
        return self._next()

    def write(self, ps: int, place: int, value: np.ndarray) -> None:
        """Writes a part of the parameters of a ps, or of a slot, see `places`."""
        np.copyto(self._values(ps)[place], value.reshape(-1))

    @property
    def _own(self) -> Words:
        return self._ps[0].workers[self._worker]

    def _next(self) -> tuple[int, int]:
        leader, following = self._ps[0].numbers, self._own[UPDATED] + 1
        try:
            for each in self._ps[0].workers:
                self._await(each, UPDATED, following - 1)
            self._await(leader, ALLOWED, following + 1, until=lambda: following >= leader[END])
        except _Over:
            return following, IS_OVER
        allowed = leader[ALLOWED]  # before the end, which may be the smaller one
        several = min(allowed, leader[END]) - following
        return following, several if several > 0 else IS_OVER

    def _await(self, words: Words, word: int, least: int, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until a word has a value, or something else is the case.

        Raises:
            _Over: there are no more steps.
        """
        numbers, waited = self._ps[0].numbers, dict[int, float]()
        while True:
            seen = words[word]
            self.is_over = self.is_over or bool(numbers[ABORTED])
            if self.is_over:
                raise _Over
            if seen >= least or until():
                return
            words.sleep(word, seen, _CHECK_SECONDS)
            if words[word] == seen:
                self.is_over = self._have_ended(waited, partial(_stays, words, word, seen))

    def _parts(self, arrays: Sequence[np.ndarray], ps: int, more: int = 0) -> list[np.ndarray]:
        part = self._layout.part(ps, self._worker)
        return [each[part.start : part.stop + more] for each in arrays]

    def _values(self, ps: int, more: int = 0) -> list[np.ndarray]:
        """The worker's part of the parameters of a ps, and of their slots, see `places`."""
        own = self._ps[ps]
        return self._parts(own.flat, ps, more) + self._rows(own.matrices, ps, more)

    def _saved_of(self, ps: int) -> list[np.ndarray]:
        """Copies of them."""
        own = self._ps[ps]
        return self._parts(own.saved, ps) + self._rows(own.saved_matrices, ps)

    def _rows(self, matrices: Sequence[Sequence[np.ndarray]], ps: int, more: int = 0) -> list[np.ndarray]:
        found = []
        for factors, own in zip(self._layout.factors_on(ps).values(), matrices, strict=True):
            part, columns = factors.part(self._worker), factors.columns
            found += [each[part.start * columns : part.stop * columns + more] for each in own]
        return found

    def _assign_state(self, sequence: int) -> None:
        """Assigns the mean of the new values of all workers to the model's state, once more if it was done before."""
        begin, reports = self._layout.state, self._ps[0].reports[:, sequence % self._layout.kept]
        for ps, place in self._layout.assigned:
            variable = self._ps[ps].state[place]
            variable[:] = reports[:, begin : begin + variable.size].mean(axis=0)
            begin += variable.size

    def _count(self, sequence: int) -> int:
        """How many updates there were before that of a step."""
        numbers = self._ps[0].numbers
        return numbers[COUNT] + sequence - numbers[FIRST]

    def _restore(self) -> None:
        """Restores the part from before some updates, of which the last one was not finished."""
        for place, saved in self._saved:
            np.copyto(place, saved)
        self._replayed = self._own[SAVED]


def _stays(words: Words, word: int, value: int) -> bool:
    return words[word] == value


def _has_begun(numbers: Words, first: int) -> bool:
    return numbers[FIRST] >= first


def _write_mean(terms: Sequence[np.ndarray], mean: np.ndarray) -> None:
    """Writes the mean of arrays, as TensorFlow would compute it: the sum times the inverse of their number."""
    first, *others = terms
    if not others:
        np.copyto(mean, first)
        return
    np.add(first, others[0], out=mean)
    for each in others[1:]:
        mean += each
    mean *= mean.dtype.type(1 / len(terms))


def _zeros(size: int) -> np.ndarray:
    found = aligned_bytes(size)
    found[:] = 0
    return found
