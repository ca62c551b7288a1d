"""Which gradients make an update, and which worker may go on: the state of a quorum, without TensorFlow.

The chief assigns a step's number to a worker. The worker computes a gradient for the update of that number, submits it,
and waits. The first `aggregate` gradients for an update make it, and later ones are dropped (Chen et al., Revisiting
Distributed Synchronous SGD, 2016: the other workers are backup workers). With `staleness` s a worker may be assigned
steps up to s updates beyond the next one (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server, 2013); with s = 0 all of them compute with the parameters of the same update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

NO_MORE_STEPS = -1
"""Assigned to a worker when there are no more steps."""


class Assignment(NamedTuple):
    """A step for a worker.

    Args:
        worker: the worker's number.
        step: the step's number; `NO_MORE_STEPS` if there are no more.
        several: whether the worker is promised `several` steps, this the first of them.
    """

    worker: int
    step: int
    several: bool


@dataclass(frozen=True)
class Gradient:
    """A gradient that a worker has submitted.

    Args:
        worker: the worker's number.
        step: the update it is for.
        key: the key that it is stored under on the ps.
        staleness: updates made since the worker was assigned the step.
    """

    worker: int
    step: int
    key: int
    staleness: int


@dataclass
class _WorkerState:
    """A worker.

    Args:
        assigned: the last step that it was assigned.
        submitted: the last step that it submitted a gradient for.
        waits: whether it waits for a step.
        promised: all steps before this one have been promised to it.
        updates_at: for each assigned step how many updates had been made then.
    """

    assigned: int
    submitted: int
    waits: bool = False
    promised: int = 0
    updates_at: dict[int, int] = field(default_factory=dict)


class QuorumPolicy:
    """The state of a training whose updates take the gradients of several workers.

    Args:
        workers: how many there are.
        aggregate: gradients that make an update.
        staleness: updates that a worker may be ahead of the next one.
        done: updates that were made before.
        end: no step from this one on is assigned.

    Attributes:
        several: how many steps a worker may be promised at a time if each update takes a gradient of every worker; 1:
            none but the one that it is assigned.
        largest_gap: the most steps that a worker has been ahead of the slowest.
    """

    def __init__(self, workers: int, aggregate: int, staleness: int, done: int, end: int) -> None:
        self._aggregate = aggregate
        self._staleness = staleness
        self.done = done
        self.end = end
        self.several = 1
        self.largest_gap = 0
        self._promised = 0
        """All updates before this one are certain."""
        self._all_take_part = aggregate == workers
        self._workers = [_WorkerState(done - 1, done - 1) for _ in range(workers)]
        self._submitted: dict[int, list[Gradient]] = {}

    def start(self, worker: int) -> None:
        """A worker starts, or restarts: the steps that it was assigned and has not submitted are lost."""
        state = self._workers[worker]
        state.assigned, state.waits, state.promised = state.submitted, True, 0

    def submit(self, worker: int, step: int, key: int) -> bool:
        """Accepts the gradient of a worker, which then waits for another step.

        Args:
            worker: the worker's number.
            step: the update it is for.
            key: the key that it is stored under on the ps.

        Returns:
            Whether an update will take the gradient.
        """
        state = self._workers[worker]
        again = step <= state.submitted
        state.submitted, state.waits = max(state.submitted, step), True
        submitted = self._submitted.setdefault(step, []) if step >= self.done else []
        if again or step < self.done or len(submitted) == self._aggregate:
            return False
        submitted.append(Gradient(worker, step, key, step - state.updates_at.pop(step)))
        return True

    def complete(self) -> list[Gradient]:
        """Returns the gradients of the next update in the order of the workers; none while there are too few."""
        submitted = self._submitted.get(self.done, [])
        return sorted(submitted, key=lambda each: each.worker) if len(submitted) == self._aggregate else []

    def updated(self) -> bool:
        """The next update is made; returns whether it is certain that it is the first of `several`."""
        step = self.done
        del self._submitted[step]
        self.done += 1
        several = self._is_certain(step, self._promised)
        if several:
            self._promised = step + self.several
        return several

    def _is_certain(self, step: int, promised: int) -> bool:
        """Whether `several` steps from this one on can be promised, if those before `promised` have been promised."""
        return self._all_take_part and 1 < self.several <= self.end - step and promised <= step

    def assign(self) -> Iterator[Assignment]:
        """Yields assignments for workers that wait.

        Until a worker has been assigned the steps that it was promised, it is promised no others.
        """
        for worker, state in enumerate(self._workers):
            step = max(state.assigned + 1, self.done)
            if not state.waits or self.done + self._staleness < step < self.end:
                continue
            state.waits = False
            if step >= self.end:
                yield Assignment(worker, NO_MORE_STEPS, several=False)
                continue
            state.assigned, state.updates_at[step] = step, self.done
            slowest = min(max(each.submitted + 1, self.done) for each in self._workers)
            self.largest_gap = max(self.largest_gap, step - slowest)
            several = self._is_certain(step, state.promised)
            if several:
                state.promised = step + self.several
            yield Assignment(worker, step, several)

    def wind_up(self) -> None:
        """Ends with the last step that has been assigned or promised."""
        last = max(max(state.assigned + 1, state.promised) for state in self._workers)
        self.end = min(self.end, max(self.done, self._promised, last))

    def left_over(self) -> list[Gradient]:
        """Returns the gradients of updates that were never made."""
        return [gradient for submitted in self._submitted.values() for gradient in submitted]
