"""Decides how many steps are scheduled at once: many if steps are short, few if they take long.

Steps in flight are finished before a training pauses, for a checkpoint or to end. Steps of a millisecond are scheduled
by the dozen, or a worker would wait for the chief most of the time; a dozen steps of a second each would delay a pause.
The first steps are single: they show how long a step takes, long before a function of a dozen steps is compiled.

A task that is stopped for a while (SIGSTOP, a suspended machine) is no reason for fewer steps. So the time of a step is
the median of recent measurements: a stall shows in one measurement of each worker.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from statistics import median_low

_FEW_STEPS = 4
"""Executions of fewer steps than this cost more than compiling a second function for the remainder."""
MAX_EXECUTION_SECONDS = 2.0
"""Seconds that an execution may take, if it cannot be stopped before its end."""
_UNROLLED_SECONDS = 1.0
"""Seconds of an execution from which on unrolled steps save less than their delay of a pause costs."""
_LOOP_SECONDS = 5.0
"""Seconds that an execution may take if it can be stopped after each step: a lost worker's steps are taken again, and
only executions that are done are reported."""
_MEASURED_SECONDS = 1.0
_IN_FLIGHT = 3
"""Executions in flight for each worker, so that none waits for the chief."""


class Pacing:
    """Measures how long a worker's step takes.

    Args:
        workers: how many workers run at the same time.

    Attributes:
        workers: their current number.
    """

    def __init__(self, workers: int) -> None:
        self._recent: deque[float] = deque()
        self.resize(workers)

    def resize(self, workers: int) -> None:
        """Changes the number of workers."""
        self.workers = workers
        self._recent = deque(self._recent, maxlen=2 * workers + 1)

    def took(self, steps: int, seconds: float) -> None:
        """Notes how long steps of one worker took."""
        self._recent.append(seconds / steps)

    @property
    def step_seconds(self) -> float | None:
        """Seconds that a worker's step takes; None if nothing is measured yet."""
        return median_low(self._recent) if self._recent else None

    def size(self, wanted: int) -> int:
        """Steps in the next execution that cannot be stopped: `wanted`, or 1 if these take long, or at the start."""
        seconds = self.step_seconds
        return 1 if seconds is None or seconds * wanted > MAX_EXECUTION_SECONDS else wanted

    def unrolls(self, steps: int) -> bool:
        """Whether steps are so short that they are worth unrolling."""
        return self.step_seconds is not None and self.step_seconds * steps <= _UNROLLED_SECONDS

    def loop_size(self, wanted: int) -> int:
        """Steps in the next execution that can be stopped: up to `wanted`, fewer if these take long, 1 at the start."""
        seconds = self.step_seconds
        return 1 if seconds is None else max(1, min(wanted, int(_LOOP_SECONDS / max(seconds, 1e-6))))

    @property
    def in_flight(self) -> int:
        """Executions of all workers together that may be in flight: one each until something is measured."""
        return self.workers * (_IN_FLIGHT if self._recent else 1)


class ArrivalPacing(Pacing):
    """Measures by the times when steps that all workers take together are reported.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(workers=1)
        self._clock = clock
        self._compiled: Counter[int] = Counter()
        """For each size the executions so far: the first one includes compilation."""
        self._steps, self._seconds = 0, 0.0
        """What the next measurement has so far."""
        self.begin()

    def begin(self) -> None:
        """Starts or goes on to measure: the time in between is not counted.

        An epoch may be shorter than a measurement. If each one began anew, there would be measurements of epochs with a
        stall only.
        """
        self._since = self._clock()

    def done(self, steps: int) -> None:
        """Counts steps that are reported.

        Measurements after the first one take at least a second: reports that arrive while the chief is busy are read
        all at once.

        Args:
            steps: how many.
        """
        seconds = self._clock() - self._since
        self.begin()
        if not self._compiled[steps]:
            self._compiled[steps] += 1
            return
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if not self._recent or self._seconds >= _MEASURED_SECONDS:
            self.took(self._steps, self._seconds)
            self._steps, self._seconds = 0, 0.0


def auto_steps_per_execution(steps_per_epoch: int, workers: int, most: int) -> int:
    """The default steps per execution: the largest number up to `most` that divides an epoch, unless it is small.

    Dividing evenly needs one compiled function; a remainder needs a second one, for single steps. Every worker should
    have an execution in each epoch.
    """
    limit = min(most, max(1, steps_per_epoch // workers))
    best = max(size for size in range(1, limit + 1) if steps_per_epoch % size == 0)
    return best if best >= min(_FEW_STEPS, limit) else limit
