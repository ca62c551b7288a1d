"""Estimates the remaining time of a training, so that it neither jumps with each report nor forgets pauses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist_cli.launch.run.snapshot import Progress

_MEMORY = 30.0
"""Seconds over which the rate is averaged: a change has 63% of its effect after so long."""


class RemainingTime:
    """Averages the steps per second of the whole job, with exponentially decreasing weights.

    Validations and checkpoints count, because the remaining training has them too. A restart begins a new average. The
    first report has no estimate: its rate contains the time in which functions were traced and compiled.
    """

    def __init__(self) -> None:
        self._last: Progress | None = None
        self._at = 0.0
        self._steps = 0.0
        self._seconds = 0.0

    def update(self, progress: Progress | None, now: float) -> float | None:
        """Takes the chief's last progress, and returns the remaining seconds; None if they are unknown.

        Args:
            progress: the last report.
            now: seconds since the job began.
        """
        if progress is not self._last and progress is not None:
            self._add(progress, now)
        if progress is None or progress.total is None or progress.step >= progress.total:
            return None
        if not (self._seconds and self._steps):
            return None
        rate = self._steps / self._seconds
        return max(0.0, (progress.total - progress.step) / rate - (now - self._at))

    def _add(self, progress: Progress, now: float) -> None:
        if self._last is None or progress.step < self._last.step:
            self._steps = self._seconds = 0.0
        elif now > self._at:
            kept = math.exp((self._at - now) / _MEMORY)
            self._steps = self._steps * kept + progress.step - self._last.step
            self._seconds = self._seconds * kept + now - self._at
        self._last, self._at = progress, now
