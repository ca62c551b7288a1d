"""Statistics of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and range of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Computes median and range of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int) -> str:
        """Formats median and range: `143 (139 to 150)`."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"
