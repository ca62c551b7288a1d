"""Decides how many steps are scheduled at once: many if steps are short, few if they take long.

Steps in flight are finished before a training pauses, for a checkpoint or to end. Steps of a millisecond are scheduled
by the dozen, or a worker would wait for the chief most of the time; a dozen steps of a second each would delay a pause.
The first steps are single: they show how long a step takes, long before a function of a dozen steps is compiled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

_FEW_STEPS = 4
"""Executions of fewer steps than this cost more than compiling a second function for the remainder."""
MAX_EXECUTION_SECONDS = 2.0
"""Seconds that an execution may take."""
_MEASURED_SECONDS = 1.0
_IN_FLIGHT = 3
"""Executions in flight for each worker, so that none waits for the chief."""


class Pacing:
    """Measures how long a worker's step takes.

    Args:
        workers: how many workers run at the same time.
        clock: returns monotonic seconds.

    Attributes:
        workers: how many workers run at the same time now.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.workers = workers
        self._clock = clock
        self._step_seconds: float | None = None
        self._compiled: Counter[int] = Counter()
        """For each size the executions so far: the first ones include compilation, on the chief and on each worker."""
        self.begin()

    def begin(self) -> None:
        """Starts to measure; earlier measurements are kept, the time in between is not counted."""
        self._since = self._clock()
        self._steps = self._executions = 0

    def done(self, steps: int) -> None:
        """Counts an execution that is done.

        The first measurement is complete when there is one execution of each worker. Later ones take at least a second:
        executions that finish while the chief is busy arrive all at once.

        Args:
            steps: its steps.
        """
        if self._compiled[steps] < self.workers:
            self._compiled[steps] += 1
            self.begin()
            return
        self._steps += steps
        self._executions += 1
        elapsed = self._clock() - self._since
        if self._executions >= self.workers and (self._step_seconds is None or elapsed >= _MEASURED_SECONDS):
            self._step_seconds = elapsed * self.workers / self._steps
            self.begin()

    def size(self, wanted: int) -> int:
        """Steps in the next execution: `wanted`, or 1 if these would take long, or if nothing is measured yet."""
        return 1 if self._step_seconds is None or self._step_seconds * wanted > MAX_EXECUTION_SECONDS else wanted

    @property
    def in_flight(self) -> int:
        """Executions of all workers together that may be in flight: one each until something is measured."""
        return self.workers * (_IN_FLIGHT if self._step_seconds is not None else 1)


def auto_steps_per_execution(steps_per_epoch: int, workers: int, most: int) -> int:
    """The default steps per execution: the largest number up to `most` that divides an epoch, unless it is small.

    Dividing evenly needs one compiled function; a remainder needs a second one, for single steps. Every worker should
    have an execution in each epoch.
    """
    limit = min(most, max(1, steps_per_epoch // workers))
    best = max(size for size in range(1, limit + 1) if steps_per_epoch % size == 0)
    return best if best >= min(_FEW_STEPS, limit) else limit
