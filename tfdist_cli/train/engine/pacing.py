"""How much work is given out at once: much while steps are short, little when they take long.

What is under way is finished before a training pauses, for a checkpoint or to end. Steps of a millisecond are given out
by the dozen, or a worker would wait for the chief most of the time; of steps of a second that would be minutes. The
first ones are single: they tell how long a step takes, and come long before a function of a dozen would be compiled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

_FEW_STEPS = 4
"""Executions of fewer steps than this cost more than compiling a second function for the remainder."""
LONG = 2.0
"""Seconds that an execution may take."""
_MEASURED_SECONDS = 1.0
_AHEAD = 3
"""Executions in flight for each worker, so that none waits for the chief."""


class Pacing:
    """Measures how long a worker's step takes.

    Args:
        workers: how many work at the same time.
        clock: seconds that never go back.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._step_seconds: float | None = None
        self._compiled: Counter[int] = Counter()
        """By their steps, executions that came first and also compiled, on the chief and on each worker."""
        self.begin()

    def begin(self) -> None:
        """Work is given out from now on; what went before is remembered, the time since is not counted."""
        self._since = self._clock()
        self._steps = self._executions = 0

    def done(self, steps: int) -> None:
        """An execution of so many steps has come back.

        The first measurement is complete when each worker has had its share. Later ones take a second at least: what
        was finished while the chief was busy comes back all at once.
        """
        if self._compiled[steps] < self._workers:
            self._compiled[steps] += 1
            self.begin()
            return
        self._steps += steps
        self._executions += 1
        elapsed = self._clock() - self._since
        if self._executions >= self._workers and (self._step_seconds is None or elapsed >= _MEASURED_SECONDS):
            self._step_seconds = elapsed * self._workers / self._steps
            self.begin()

    def size(self, wanted: int) -> int:
        """Steps in the next execution: as many as wanted, or 1 when these would take long, or nobody knows yet."""
        return 1 if self._step_seconds is None or self._step_seconds * wanted > LONG else wanted

    @property
    def in_flight(self) -> int:
        """Executions of all workers together that may be under way: one each until it is known how long they take."""
        return self._workers * (_AHEAD if self._step_seconds is not None else 1)


def auto_steps_per_execution(steps_per_epoch: int, workers: int, most: int) -> int:
    """Steps in an execution when none are named: the largest number up to `most` that divides an epoch, unless small.

    Dividing evenly needs one compiled function; a remainder needs a second one, for single steps. Every worker should
    have an execution in each epoch.
    """
    limit = min(most, max(1, steps_per_epoch // workers))
    best = max(size for size in range(1, limit + 1) if steps_per_epoch % size == 0)
    return best if best >= min(_FEW_STEPS, limit) else limit
