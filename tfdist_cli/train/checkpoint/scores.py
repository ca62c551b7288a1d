"""Scores of checkpoints: which one is the best, and whether none has become better for long.

The evaluator writes the scores to evaluator.json beside the checkpoints. So they survive restarts of the evaluator, and
the training reads there whether it is to stop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.run_files import number, parse_object


class CheckpointScores:
    """The scores of the checkpoints of one training.

    Args:
        monitor: the metric, as the recipe names it.
        maximizes: whether a higher value is better.
        patience: checkpoints in a row without a better value after which the training stops; None for no end.
        values: the values so far, by step.
    """

    def __init__(
        self, monitor: str, *, maximizes: bool, patience: int | None, values: Mapping[int, float] | None = None
    ) -> None:
        self.monitor = monitor
        self._sign = 1 if maximizes else -1
        self._patience = patience
        self._values = dict(values or {})

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Adds a checkpoint's metrics; returns whether it is the best one now, and was not before.

        Raises:
            UsageError: there is no such metric.
        """
        name = self.monitor.removeprefix("val_")
        if name not in metrics:
            raise UsageError(
                f"the model has no metric {name!r}, which evaluate.monitor names",
                code="unknown-monitor",
                hint=f"use one of {', '.join(f'val_{each}' for each in metrics)}",
            )
        before, self._values[step] = self._values.get(step), metrics[name]
        return self.best == step and before != metrics[name]

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint: the first one with the best value."""
        return self._ranked()[0]

    @property
    def best_value(self) -> float | None:
        """Its value."""
        return None if self.best is None else self._values[self.best]

    @property
    def stops(self) -> bool:
        """Whether no checkpoint has been better than the best one for `patience` checkpoints."""
        return self._patience is not None and self._ranked()[1] >= self._patience

    def packed(self) -> dict[str, Any]:
        """Returns them for evaluator.json."""
        values = {str(step): value for step, value in sorted(self._values.items()) if math.isfinite(value)}
        return {"monitor": self.monitor, "values": values, "best": self.best, "stops": self.stops}

    def restore(self, content: bytes) -> None:
        """Continues with the values of an evaluator.json, if it is not damaged and has those of the same metric."""
        packed = _object(content)
        values = packed.get("values")
        if packed.get("monitor") == self.monitor and isinstance(values, dict):
            read = {int(step): number(value) for step, value in values.items() if step.isdecimal()}
            self._values = {step: value for step, value in read.items() if value is not None}

    def _ranked(self) -> tuple[int | None, int]:
        """Returns the step of the best value, and how many checkpoints there are after it."""
        best, waited = None, 0
        for step in sorted(self._values):
            value = self._values[step]
            if not math.isnan(value) and (best is None or self._sign * (value - self._values[best]) > 0):
                best, waited = step, 0
            else:
                waited += 1
        return best, waited


def stop_reason(content: bytes) -> str | None:
    """Returns why the evaluator wants the training to stop, by its evaluator.json; None if it does not."""
    packed = _object(content)
    if packed.get("stops") is not True:
        return None
    return f"no checkpoint since step {packed.get('best')} has a better {packed.get('monitor')}"


def _object(content: bytes) -> dict[str, Any]:
    try:
        return parse_object(content)
    except (ValueError, json.JSONDecodeError):
        return {}
