"""Ratios of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist_cli.bench.figures import Spread


@dataclass(frozen=True)
class Comparison:
    """Two contestants measured in the same rounds.

    Args:
        ours: tfdist's measurements, one for each round.
        peer: the peer's, in the same order.
    """

    ours: Sequence[float]
    peer: Sequence[float]

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.peer):
            raise ValueError(f"{len(self.ours)} rounds of tfdist and {len(self.peer)} of its peer")

    @property
    def of_medians(self) -> float:
        """The ratio of the medians."""
        return statistics.median(self.ours) / statistics.median(self.peer)

    @property
    def paired(self) -> Spread:
        """The ratios within rounds, which a load that changes between rounds does not affect."""
        return Spread.of(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each round."""
        return [ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)]
