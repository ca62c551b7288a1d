"""Which workers' gradients make an update, and which worker may go on: synchronous updates without TensorFlow.

A worker is given a step's number, computes a gradient for the update of that number, hands it in, and waits. The first
`aggregate` gradients for an update make it; those that come later are dropped (Chen et al., Revisiting Distributed
Synchronous SGD, 2016: the others are backup workers). With `staleness` s a worker may be given steps up to s updates
ahead of the next one (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
2013); with s = 0 all of them compute with the parameters of the same update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gradient:
    """What a worker has handed in.

    Args:
        worker: its number.
        step: the update it is for.
        key: the name under which it waits on the ps.
        staleness: updates made since the worker was given the step.
    """

    worker: int
    step: int
    key: int
    staleness: int


@dataclass
class _Member:
    """A worker.

    Args:
        given: the last step it was given.
        handed_in: the last step it handed in a gradient for.
        waits: whether it waits for a step.
        promised: it has been told that it will be given all steps before this one.
        read: for each step it was given, how many updates had been made then.
    """

    given: int
    handed_in: int
    waits: bool = False
    promised: int = 0
    read: dict[int, int] = field(default_factory=dict)


class QuorumPolicy:
    """The state of synchronous training.

    Args:
        workers: how many there are.
        aggregate: gradients that make an update.
        staleness: updates that a worker may be ahead of the next one.
        done: updates that were made before.
        end: no step from this one on is given out.

    Attributes:
        several: how many steps a worker may be promised at a time where all have a part in each update; 1: no more than
            it is given.
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
        """All updates before this one are sure."""
        self._all_take_part = aggregate == workers
        self._members = [_Member(done - 1, done - 1) for _ in range(workers)]
        self._waiting: dict[int, list[Gradient]] = {}

    def greet(self, worker: int) -> None:
        """A worker begins, or begins again: what it was given before and has not handed in is lost."""
        member = self._members[worker]
        member.given, member.waits, member.promised = member.handed_in, True, 0

    def hand_in(self, worker: int, step: int, key: int) -> bool:
        """Takes the gradient of a worker that waits for another step; says whether it will have a part in an update.

        Args:
            worker: the worker's number.
            step: the update it is for.
            key: the name under which it waits on the ps.
        """
        member = self._members[worker]
        again = step <= member.handed_in
        member.handed_in, member.waits = max(member.handed_in, step), True
        own = self._waiting.setdefault(step, []) if step >= self.done else []
        if again or step < self.done or len(own) == self._aggregate:
            return False
        own.append(Gradient(worker, step, key, step - member.read.pop(step)))
        return True

    def complete(self) -> list[Gradient]:
        """The gradients of the next update, in the order of the workers; none while there are too few."""
        own = self._waiting.get(self.done, [])
        return sorted(own, key=lambda each: each.worker) if len(own) == self._aggregate else []

    def updated(self) -> bool:
        """The next update is made; whether it is sure that it is the first of `several`."""
        step = self.done
        del self._waiting[step]
        self.done += 1
        several = self._sure(step, self._promised)
        if several:
            self._promised = step + self.several
        return several

    def _sure(self, step: int, promised: int) -> bool:
        """Whether `several` steps from this one on can be promised to who has been promised those before another."""
        return self._all_take_part and 1 < self.several <= self.end - step and promised <= step

    def assign(self) -> Iterator[tuple[int, int, bool]]:
        """Gives steps to workers that wait.

        Yields:
            The worker; its step, -1 when there is no more to do; whether it is promised `several` steps, this the first
            of them. Until it has been given these, it is promised no others.
        """
        for worker, member in enumerate(self._members):
            step = max(member.given + 1, self.done)
            if not member.waits or self.done + self._staleness < step < self.end:
                continue
            member.waits = False
            if step >= self.end:
                yield worker, -1, False
                continue
            member.given, member.read[step] = step, self.done
            slowest = min(max(each.handed_in + 1, self.done) for each in self._members)
            self.largest_gap = max(self.largest_gap, step - slowest)
            several = self._sure(step, member.promised)
            if several:
                member.promised = step + self.several
            yield worker, step, several

    def wind_up(self) -> None:
        """Ends with the last step that has been given, or is sure to follow."""
        last = max(max(member.given + 1, member.promised) for member in self._members)
        self.end = min(self.end, max(self.done, self._promised, last))

    def left_over(self) -> list[Gradient]:
        """Gradients of updates that were never made."""
        return [gradient for own in self._waiting.values() for gradient in own]
