"""Batches in proportion to the speeds of workers, so that all workers of an update are done at the same time.

It is measured how long each worker takes for a step, and the examples of an update are divided anew if this would save
time. The sum of the batches does not change: it is the batch that one process would train on. The chief of parameter
servers decides for all workers; mirrored tasks, which all receive the same measurements, decide alike.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

log = logging.getLogger("tfdist")

_LEAST_GAIN = 0.02
"""The share of an update's time that other batches have to save."""
_FIRST_WINDOW, _LONGEST_WINDOW = 8, 128
"""Steps that are measured before the batches change: few at first, more after each change."""


class BatchSizes:
    """How many examples of each update a worker takes.

    Args:
        workers: how many workers there are.
        batch: the mean of their batches, in examples.
        logs: whether new sizes are logged.
    """

    def __init__(self, workers: int, batch: int, *, logs: bool = True) -> None:
        self._logs = logs
        self._sizes = [batch] * workers
        self._window = _FIRST_WINDOW
        self._seconds: list[Sequence[float]] = []

    @property
    def bounds(self) -> list[int]:
        """Where the batches of the workers begin in an update's examples, and the end: `workers` + 1 numbers."""
        return [sum(self._sizes[:worker]) for worker in range(len(self._sizes) + 1)]

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes one update into account.

        Args:
            sizes: each worker's examples in it.
            seconds: how long each worker took, from the update before until its gradient was there.
        """
        if list(sizes) != self._sizes:
            return  # ordered before the last change
        self._seconds.append(seconds)
        if len(self._seconds) < self._window:
            return
        # The median, since a worker may pause, and its first step with a new size takes longer.
        typical = [statistics.median(each) for each in zip(*self._seconds, strict=True)]
        self._seconds.clear()
        if min(typical) <= 0:
            return
        better, expected = divided(self._sizes, typical)
        if better != self._sizes and 1 - expected / max(typical) > _LEAST_GAIN:
            self._sizes = better
            self._window = min(2 * self._window, _LONGEST_WINDOW)
            if self._logs:
                log.info("workers take batches of %s examples, by their speeds", ", ".join(map(str, better)))


def divided(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[list[int], float]:
    """Divides examples in proportion to speeds: examples per second.

    If a part of a step's time does not depend on its batch, repeated divisions approach equal times.

    Args:
        sizes: each worker's batch, at least 1.
        seconds: how long each takes for it.

    Returns:
        New sizes, at least 1 each, with the same sum; and the seconds that they take if time is proportional to size.
    """
    total = sum(sizes)
    speeds = [size / spent for size, spent in zip(sizes, seconds, strict=True)]
    exact = [total * speed / sum(speeds) for speed in speeds]
    new = [max(1, int(share)) for share in exact]
    while sum(new) != total:
        # Largest remainders: the worker that is furthest from its share is next, without falling below 1.
        step = 1 if sum(new) < total else -1
        possible = [worker for worker in range(len(new)) if new[worker] + step >= 1]
        new[max(possible, key=lambda worker: step * (exact[worker] - new[worker]))] += step
    return new, max(size / speed for size, speed in zip(new, speeds, strict=True))
