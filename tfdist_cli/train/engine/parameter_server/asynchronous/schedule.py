"""Divides the steps of an asynchronous run into executions: for any worker, or into an equal share of each worker.

A lane holds steps that are not scheduled yet. Dynamically, there is one lane, whose executions any worker takes. With
`worker_steps: equal`, each worker has a lane of its own. Steps of a lost worker wait until it is back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.tf_compat.coordinator import failure_of, is_aborted, is_dead, wait_for

_POLL_SECONDS = 0.1
"""How often it is looked whether the training is to pause, and whether a later execution is done before the first."""

Run = Callable[..., Any]
"""Schedules an execution: number of its first step, number of steps, whether they are unrolled → its `RemoteValue`."""


@dataclass(frozen=True)
class Scheduled:
    """An execution in flight.

    Args:
        number: of its first step.
        count: how many steps it is to take.
        unrolled: whether these are unrolled.
        remote: its `RemoteValue`.
        worker: TensorFlow's worker, if no other one may take it.
    """

    number: int
    count: int
    unrolled: bool
    remote: Any
    worker: Any = None


@dataclass
class Lane:
    """Steps that are not scheduled yet.

    Args:
        run: schedules an execution of them.
        left: how many there are.
        workers: how many workers take them.
        worker: TensorFlow's worker whose share they are; None if any worker takes them.
    """

    run: Run
    left: int
    workers: int = 1
    worker: Any = None

    def __post_init__(self) -> None:
        self.shared = self.share = 0
        """The size that shares were computed for, and the steps of a share."""

    @property
    def index(self) -> int | None:
        """The index of its worker."""
        return None if self.worker is None else self.worker.worker_index


class Schedule:
    """Divides the steps of a run into executions, and keeps those in flight.

    Args:
        pace: decides how many steps are scheduled at once.
        every: steps in a round, see `Updates.steps_per_round`.
        lanes: the steps.
        number: of the first one.
        unrolls: whether workers have compiled a function of so many unrolled steps.
    """

    def __init__(
        self,
        pace: Pacing,
        every: int,
        lanes: Sequence[Lane],
        number: int,
        unrolls: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._pace, self._every, self._unrolls = pace, every, unrolls
        self._lanes, self.next_number = list(lanes), number
        self._flying: Counter[int | None] = Counter()
        """Executions in flight by the index of their worker; None is any worker."""
        self._poll = threading.Event()
        self.in_flight: list[Scheduled] = []

    @property
    def left(self) -> int:
        """Steps that are not scheduled yet."""
        return sum(lane.left for lane in self._lanes)

    @property
    def may_add(self) -> bool:
        """Whether another execution may be in flight."""
        return self._next_lane() is not None

    @property
    def awaited(self) -> frozenset[int]:
        """The indices of the lost workers whose steps alone are left; none if other workers have steps."""
        lost = all(lane.worker is not None and is_dead(lane.worker) for lane in self._lanes if lane.left)
        if not (lost and all(self._waits(each) for each in self.in_flight)):
            return frozenset()
        workers = [*(lane.worker for lane in self._lanes if lane.left), *(each.worker for each in self.in_flight)]
        return frozenset(worker.worker_index for worker in workers)

    def divide(self, lanes: Sequence[Lane]) -> None:
        """Replaces the lanes: other workers take the steps that are not scheduled yet."""
        self._lanes = list(lanes)

    def steps_in_flight(self, worker: Any) -> int:
        """Returns how many steps of one worker are in flight."""
        return sum(each.count for each in self.in_flight if each.worker is worker)

    def add(self, size: int, *, adapts: bool, loops: bool) -> None:
        """Schedules an execution.

        Args:
            size: steps in an execution.
            adapts: whether it may have fewer steps.
            loops: whether executions may be loops.
        """
        lane = self._next_lane()
        if lane is None:
            return
        size = self._whole_rounds(size)
        count, unrolled = self._count(lane, size, adapts=adapts, loops=loops)
        self._add(lane, lane.run, count, unrolled=unrolled)

    def add_first(self, run: Run, count: int, *, unrolled: bool) -> None:
        """Schedules an execution of a form that is in use, if there are steps for it that any worker may take."""
        lane = self._lanes[0]
        if count <= lane.left:
            self._add(lane, run, count, unrolled=unrolled)

    def add_again(self, scheduled: Scheduled) -> None:
        """Schedules an execution whose worker was lost, or has left, on another one."""
        lane = min(self._lanes, key=lambda lane: self._flying[lane.index])
        remote = lane.run(scheduled.number, scheduled.count, unrolled=scheduled.unrolled)
        self._fly(replace(scheduled, remote=remote, worker=lane.worker))

    def keep(self, scheduled: Scheduled) -> None:
        """Waits for an execution whose worker was lost, and runs it again when it is back."""
        self._fly(scheduled)

    def drop_waiting(self) -> None:
        """Forgets the executions of lost workers; their steps are taken later."""
        for scheduled in [each for each in self.in_flight if self._waits(each)]:
            self.in_flight.remove(scheduled)
            self._flying[scheduled.worker.worker_index] -= 1

    def next_done(self) -> Scheduled | None:
        """Takes one of the executions that are done; None if none is after a while.

        Those of a worker that is slow, stopped for a while or lost, do not delay those of the others.
        """
        running = [each for each in self.in_flight if not self._waits(each)]
        if not running:
            self._poll.wait(_POLL_SECONDS)  # TensorFlow has no event for a worker that is back
            return None
        wait_for(running[0].remote, _POLL_SECONDS)
        for index, scheduled in enumerate(self.in_flight):
            if not self._waits(scheduled) and wait_for(scheduled.remote, 0):
                self._flying[scheduled.worker and scheduled.worker.worker_index] -= 1
                return self.in_flight.pop(index)
        return None

    def failures(self) -> list[Exception]:
        """Returns the errors of executions in flight that have failed."""
        return [error for each in self.in_flight if (error := failure_of(each.remote)) is not None]

    def _waits(self, scheduled: Scheduled) -> bool:
        """Whether the worker of an execution is lost, and takes it again when it is back."""
        if scheduled.worker is None or not is_aborted(scheduled.remote):
            return False
        return any(lane.worker is scheduled.worker for lane in self._lanes)

    def _next_lane(self) -> Lane | None:
        """Returns the lane with the fewest executions in flight of those that may have another one."""
        free = [lane for lane in self._lanes if lane.left > 0 and self._flying[lane.index] < self._most(lane)]
        return min(free, key=lambda lane: self._flying[lane.index], default=None)

    def _most(self, lane: Lane) -> int:
        """Executions of a lane that may be in flight: a lost worker would take new ones later than the others."""
        if lane.worker is None:
            return self._pace.in_flight
        return 0 if is_dead(lane.worker) else self._pace.in_flight // self._pace.workers

    def _add(self, lane: Lane, run: Run, count: int, *, unrolled: bool) -> None:
        remote = run(self.next_number, count, unrolled=unrolled)
        self._fly(Scheduled(self.next_number, count, unrolled, remote, lane.worker))
        lane.left -= count
        self.next_number += count

    def _fly(self, scheduled: Scheduled) -> None:
        self.in_flight.append(scheduled)
        self._flying[scheduled.worker and scheduled.worker.worker_index] += 1

    def _count(self, lane: Lane, size: int, *, adapts: bool, loops: bool) -> tuple[int, bool]:
        """Steps in the next execution, and whether they are unrolled: a loop takes whole rounds."""
        if lane.left < self._every:
            return lane.left, True
        if not loops:
            return self._every, True
        short = self._pace.unrolls(size) and self._unrolls(size)
        wanted = size if short or not adapts else self._whole_rounds(self._pace.loop_size(size))
        wanted = self._fair(lane, wanted, keeps_size=short) if adapts else wanted
        count = wanted if lane.left >= wanted else lane.left - lane.left % self._every
        return count, short and count == size

    def _fair(self, lane: Lane, size: int, *, keeps_size: bool) -> int:
        """Up to `size` steps, so that all workers get as many: none waits at the end of a run for another's execution.

        Args:
            lane: the steps.
            size: the most steps.
            keeps_size: whether only the last executions may have fewer.
        """
        if keeps_size and lane.left > size * lane.workers:
            return size
        if lane.shared != size:
            executions = ceil(lane.left / (size * lane.workers)) * lane.workers
            lane.shared, lane.share = size, self._whole_rounds(ceil(lane.left / executions))
        return min(size, lane.share)

    def _whole_rounds(self, steps: int) -> int:
        return steps + -steps % self._every


def equal_shares(taken: Sequence[int], steps: int) -> list[int]:
    """Divides steps among workers so that all have taken the same number afterwards, or nearly so.

    Args:
        taken: the steps that each worker has taken so far.
        steps: how many steps to divide.

    Returns:
        The steps of each worker. Their sum is `steps`; a worker that is ahead of what all will have gets none.
    """
    order = sorted(range(len(taken)), key=lambda worker: taken[worker])
    shares = [0] * len(taken)
    for size in range(len(order), 0, -1):
        lowest = order[:size]
        level, rest = divmod(sum(taken[worker] for worker in lowest) + steps, size)
        if taken[lowest[-1]] <= level:
            for rank, worker in enumerate(lowest):
                shares[worker] = level - taken[worker] + (rank < rest)
            break
    return shares
