"""How a training tells how it goes: lines in metrics.jsonl, records for the launcher, a log line for people."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.records import emit
from tfdist_cli.train.engine import Engine, Execution

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
REPORT_SECONDS = 1.0
"""How often a running epoch is reported."""

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class _Mark:
    time: float
    steps: dict[str, int]
    examples: dict[str, int]


class Progress:
    """Counts what executions have done and reports it; only the chief reports.

    Args:
        run_dir: where metrics.jsonl goes; None keeps no file.
        engine: what runs the steps.
        first: the global step that training starts at here.
        total: the global step the training ends at.
        epochs: the epochs it takes.
    """

    def __init__(self, run_dir: Path | None, *, engine: Engine, first: int, total: int, epochs: int) -> None:
        self._path = run_dir / METRICS_FILE if run_dir else None
        self._active = engine.is_chief
        self._synchronous = engine.synchronous
        self._first = first
        self._total = total
        self._epochs = epochs
        self._steps: dict[str, int] = {}
        self._examples: dict[str, int] = {}
        self._step = first
        self._scores: dict[str, tuple[int, dict[str, float]]] = {}
        self._begun = time.monotonic()
        self._last = self._epoch = self._mark()

    def count(self, execution: Execution) -> None:
        """Adds an execution."""
        for counts, more in ((self._steps, execution.steps), (self._examples, execution.examples)):
            for worker, number in more.items():
                counts[worker] = counts.get(worker, 0) + number

    def due(self) -> bool:
        """Whether a running epoch should be reported now."""
        return self._active and time.monotonic() - self._last.time >= REPORT_SECONDS

    def report(self, split: str, step: int, epoch: int, values: dict[str, Any], *, done: bool = False) -> None:
        """Writes one line of metrics.jsonl, and tells the launcher.

        Args:
            split: what the values were measured on: `train`, or the name of another split.
            step: the global step.
            epoch: the epoch under way, from 1.
            values: each metric's value, as `MetricTotals.logs` gives them.
            done: whether the epoch is over.
        """
        if not self._active:
            return
        values = numbers(values)
        rates: dict[str, Any] = {}
        if split == "train":
            rates = self._rates(self._epoch if done else self._last)
            self._last = self._mark()
        self._step = step
        self._scores[split] = (step, values)
        line = {"time": now(), "split": split, "step": step, "epoch": epoch, "epoch_done": done, "values": values}
        if self._path:
            append(self._path, line | rates)
        if split == "train":
            emit(
                "progress",
                step=step,
                total=self._total,
                epoch=epoch,
                epochs=self._epochs,
                steps_per_second=rates["steps_per_second"],
                metrics=values,
                workers=rates["worker_steps_per_second"],
            )
        if done or split != "train":
            rate = f"  {rates['steps_per_second']:.1f} steps/s" if rates else ""
            scores = shown(values) if split == "train" else f"{split}: {shown(values)}"
            log.info("epoch %d/%d  step %d/%d  %s%s", epoch, self._epochs, step, self._total, scores, rate)

    def begin_epoch(self) -> None:
        """Starts the stretch that an epoch's rates are measured over."""
        self._epoch = self._last = self._mark()

    def finish(self) -> None:
        """Tells the launcher what the training came to."""
        if self._active:
            emit(
                "result",
                step=self._step,
                metrics=self._final_scores(),
                seconds=round(time.monotonic() - self._begun, 3),
                examples=sum(self._examples.values()),
                worker_steps=self._steps,
            )

    def _final_scores(self) -> dict[str, float]:
        """The last epoch's metrics, and the scores that were measured on what the training came to."""
        final: dict[str, float] = {}
        for split, (step, values) in self._scores.items():
            prefix = "" if split == "train" else f"{split}_"
            if step == self._step:
                final |= {f"{prefix}{name}": value for name, value in values.items()}
        return final

    def _rates(self, since: _Mark) -> dict[str, Any]:
        """Rates since a mark; a synchronous step of all workers is one step."""
        moment = time.monotonic()
        seconds = max(moment - since.time, 1e-9)
        steps = {name: (number - since.steps.get(name, 0)) / seconds for name, number in self._steps.items()}
        examples = {name: (number - since.examples.get(name, 0)) / seconds for name, number in self._examples.items()}
        return {
            "seconds": round(moment - self._begun, 3),
            "steps_per_second": round(self._together(steps), 2),
            "worker_steps_per_second": {name: round(rate, 2) for name, rate in steps.items()},
            "examples_per_second": {name: round(rate, 1) for name, rate in examples.items()},
            "worker_steps": dict(self._steps),
        }

    def _mark(self) -> _Mark:
        return _Mark(time.monotonic(), dict(self._steps), dict(self._examples))

    def _together(self, rates: dict[str, float]) -> float:
        if not rates:
            return 0.0
        return max(rates.values()) if self._synchronous else sum(rates.values())


def speak() -> None:
    """Lets the log be seen on standard error in a program that has set up no logging of its own."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The values with each array taken apart: `f1_score` of three classes is `f1_score[0]`, `f1_score[1]`, ..."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, float):
            flat[name] = value
        else:
            flat |= {f"{name}{list(place)}": float(part) for place, part in np.ndenumerate(value)}
    return flat


def shown(values: dict[str, float]) -> str:
    """`loss 0.123  accuracy 0.97`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds one JSON line to a file, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def now() -> str:
    """This moment in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
