"""Sums what workers report of their steps until an execution is complete."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist_cli.train.engine.base import Execution, WorkerReport
from tfdist_cli.train.engine.parameter_server.messages import StepReport


@dataclass
class Accumulator:
    """The sums since the last execution.

    Args:
        first: the number of the first update in it.
        by_examples: whether the loss of an update weighs its batches by their examples.
        following: the metrics of some updates, and of the next one → those of all; see `MetricTotals.following`.
    """

    first: int
    by_examples: bool = False
    following: Callable[[Any, Any], Any] = operator.add
    losses: list[float] = field(default_factory=list)
    metrics: Any = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    examples: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    loss_of: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[str, Any] = field(default_factory=dict)

    def drop(self, report: StepReport) -> None:
        """Counts a step whose gradient came too late for its update."""
        name = f"worker:{report.worker}"
        self.steps[name] += 1
        self.dropped[name] += 1

    def update(self, reports: Sequence[StepReport], staleness: Sequence[int]) -> None:
        """Counts an update.

        Args:
            reports: of the steps whose gradients it takes.
            staleness: for each of them how many updates its parameters were behind.
        """
        losses = [report.loss for report in reports]
        self.metrics = self.following(self.metrics, sum(report.metrics for report in reports))
        if self.by_examples:
            self.losses.append(float(np.average(losses, weights=[report.examples for report in reports])))
        else:
            self.losses.append(sum(losses) / len(losses))
        for report, updates_behind in zip(reports, staleness, strict=True):
            name = f"worker:{report.worker}"
            self.steps[name] += 1
            self.examples[name] += report.examples
            self.loss_of[name] += report.loss
            self.staleness[name].append(updates_behind)

    def updates_of_all(self, losses: np.ndarray, examples: np.ndarray, metrics: np.ndarray) -> None:
        """Counts updates that each take a gradient of all workers, whose parameters were not behind.

        Args:
            losses: of the steps, float64, shape (updates, workers).
            examples: likewise.
            metrics: likewise, shape (updates, workers, numbers).
        """
        for counted in metrics.sum(axis=1):
            self.metrics = self.following(self.metrics, counted)
        self.losses += np.average(losses, axis=1, weights=examples if self.by_examples else None).tolist()
        for worker, (loss, count) in enumerate(zip(losses.sum(axis=0).tolist(), examples.sum(axis=0), strict=True)):
            name = f"worker:{worker}"
            self.steps[name] += len(losses)
            self.examples[name] += int(count)
            self.loss_of[name] += loss
            self.staleness[name] += [0] * len(losses)

    def execution(self, votes: int, gap: int) -> Execution:
        """Returns the sums as an execution."""
        reports = {
            name: WorkerReport(
                self.loss_of[name], steps - self.dropped[name], tuple(self.staleness[name]), self.dropped[name]
            )
            for name, steps in self.steps.items()
        }
        losses, steps, examples = np.array(self.losses), dict(self.steps), dict(self.examples)
        return Execution(self.first, losses, self.metrics, steps, examples, votes, reports, gap, self.phases)
