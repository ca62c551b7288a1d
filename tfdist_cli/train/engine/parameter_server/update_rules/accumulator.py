"""What workers say of their steps, and the sums of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist_cli.train.engine.base import Execution, WorkerReport


@dataclass(frozen=True)
class Message:
    """What a worker says, and what it counted.

    Args:
        worker: its number.
        step: the step its gradient is for, or a word.
        key: what its gradient is left under; with a word the number of the worker's function.
        loss: the loss of its batch.
        examples: the examples in it.
        metrics: what they counted, packed.
        state: the state after the step, flat.
        phases: where its time went, in the order of `COLUMNS`; empty where that is not watched.
    """

    worker: int
    step: int
    key: int
    loss: float
    examples: int
    metrics: np.ndarray
    state: np.ndarray
    phases: np.ndarray


@dataclass
class Accumulator:
    """What has been counted since the last execution.

    Args:
        first: the number of the first update in it.
    """

    first: int
    losses: list[float] = field(default_factory=list)
    metrics: Any = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    examples: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    loss_of: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[str, Any] = field(default_factory=dict)

    def drop(self, message: Message) -> None:
        """A gradient came too late."""
        name = f"worker:{message.worker}"
        self.steps[name] += 1
        self.dropped[name] += 1

    def update(self, messages: list[Message], staleness: list[int]) -> None:
        """An update has been made of what workers handed in."""
        self.losses.append(float(np.mean([message.loss for message in messages])))
        for message, behind in zip(messages, staleness, strict=True):
            name = f"worker:{message.worker}"
            self.metrics = self.metrics + message.metrics
            self.steps[name] += 1
            self.examples[name] += message.examples
            self.loss_of[name] += message.loss
            self.staleness[name].append(behind)

    def execution(self, votes: int, gap: int) -> Execution:
        """All of it."""
        reports = {
            name: WorkerReport(
                self.loss_of[name], steps - self.dropped[name], tuple(self.staleness[name]), self.dropped[name]
            )
            for name, steps in self.steps.items()
        }
        losses, steps, examples = np.array(self.losses), dict(self.steps), dict(self.examples)
        return Execution(self.first, losses, self.metrics, steps, examples, votes, reports, gap, self.phases)
