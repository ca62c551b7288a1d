"""How a training tells how it goes: lines in metrics.jsonl, records for the launcher, a log line for people."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.engine.base import Engine, Execution, WorkerReport
from tfdist_cli.train.engine.step_timer import told
from tfdist_cli.train.trainer.metrics_file import MetricsFile

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
REPORT_SECONDS = 1.0
"""How often a running epoch is reported."""

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class _Mark:
    time: float
    done: int
    steps: dict[str, int]
    examples: dict[str, int]


@dataclass
class WorkerTotals:
    """What a worker did, added up.

    Args:
        loss: the sum of its batches' losses.
        batches: how many these are.
        updates: updates it had a part in.
        staleness: the sum over these of how many others the parameters had seen since it read them.
        stalest: the largest of these numbers.
        dropped: gradients of its that came too late.
    """

    loss: float = 0.0
    batches: int = 0
    updates: int = 0
    staleness: int = 0
    stalest: int = 0
    dropped: int = 0

    def add(self, report: WorkerReport) -> None:
        """Adds what it did in an execution."""
        self.loss += report.loss
        self.batches += report.batches
        self.updates += len(report.staleness)
        self.staleness += sum(report.staleness)
        self.stalest = max(self.stalest, *report.staleness, 0)
        self.dropped += report.dropped

    def values(self) -> dict[str, Any]:
        """As it is written: means over what is counted, null where that is nothing."""
        return {
            "loss": self.loss / self.batches if self.batches else None,
            "updates": self.updates,
            "staleness_mean": self.staleness / self.updates if self.updates else None,
            "staleness_max": self.stalest,
            "dropped": self.dropped,
        }


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
        self._active = engine.is_chief
        self._file = MetricsFile(run_dir / METRICS_FILE) if run_dir and self._active else None
        self._first = first
        self._total = total
        self._epochs = epochs
        self._done = 0
        self._steps: dict[str, int] = {}
        self._stretch: dict[str, WorkerTotals] = defaultdict(WorkerTotals)
        self._workers: dict[str, WorkerTotals] = defaultdict(WorkerTotals)
        self._phases: dict[str, Any] = {}
        self._gap: int | None = None
        self._examples: dict[str, int] = {}
        self._step = first
        self._scores: dict[str, tuple[int, dict[str, float]]] = {}
        self._begun = time.monotonic()
        self._last = self._epoch = self._mark()

    def begin(self, ended: int) -> None:
        """Makes room in the file for what is done once more.

        Args:
            ended: epochs whose end has been dealt with, and recorded.
        """
        if self._file:
            self._file.take_back(self._first, ended)

    def count(self, execution: Execution) -> None:
        """Adds an execution."""
        self._done += len(execution.losses)
        self._gap = execution.gap
        for task, counted in execution.phases.items():
            self._phases[task] = self._phases.get(task, 0.0) + counted
        for worker, report in execution.reports.items():
            self._stretch[worker].add(report)
            self._workers[worker].add(report)
        for counts, more in ((self._steps, execution.steps), (self._examples, execution.examples)):
            for worker, number in more.items():
                counts[worker] = counts.get(worker, 0) + number

    def due(self) -> bool:
        """Whether a running epoch should be reported now: its first steps at once, which show that it trains."""
        silent = self._step == self._first
        return self._active and (silent or time.monotonic() - self._last.time >= REPORT_SECONDS)

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
            rates["workers"] = self._told(self._stretch)
            if self._phases:
                rates["phases"] = told(self._phases)
            self._stretch.clear()
            self._last = self._mark()
        self._step = step
        self._scores[split] = (step, values)
        line = {"time": now(), "split": split, "step": step, "epoch": epoch, "epoch_done": done, "values": values}
        if self._file:
            self._file.append(line | rates)
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
            for worker, did in self._told(self._workers).items():
                log.info("%s", _line(worker, did))
            if self._gap is not None:
                log.info("no worker was more than %d steps ahead of the slowest", self._gap)

    def _told(self, workers: Mapping[str, WorkerTotals]) -> dict[str, dict[str, Any]]:
        """For each worker the steps it has taken in all, and what it did meanwhile."""
        return {
            name: {"local_step": self._steps.get(name, 0), **totals.values()}
            for name, totals in sorted(workers.items())
        }

    def _final_scores(self) -> dict[str, float]:
        """The last epoch's metrics, and the scores that were measured on what the training came to."""
        final: dict[str, float] = {}
        for split, (step, values) in self._scores.items():
            prefix = "" if split == "train" else f"{split}_"
            if step == self._step:
                final |= {f"{prefix}{name}": value for name, value in values.items()}
        return final

    def _rates(self, since: _Mark) -> dict[str, Any]:
        """Rates since a mark; a step that workers take together is one step."""
        moment = time.monotonic()
        seconds = max(moment - since.time, 1e-9)
        steps = {name: (number - since.steps.get(name, 0)) / seconds for name, number in self._steps.items()}
        examples = {name: (number - since.examples.get(name, 0)) / seconds for name, number in self._examples.items()}
        return {
            "seconds": round(moment - self._begun, 3),
            "steps_per_second": round((self._done - since.done) / seconds, 2),
            "worker_steps_per_second": {name: round(rate, 2) for name, rate in steps.items()},
            "examples_per_second": {name: round(rate, 1) for name, rate in examples.items()},
            "worker_steps": dict(self._steps),
        }

    def _mark(self) -> _Mark:
        return _Mark(time.monotonic(), self._done, dict(self._steps), dict(self._examples))


def _line(worker: str, did: Mapping[str, Any]) -> str:
    """`worker:0  1375 steps  loss 0.31  staleness 1.0, at most 3`."""
    parts = [worker, f"{did['local_step']} steps"]
    if did["loss"] is not None:
        parts.append(f"loss {did['loss']:.4g}")
    if did["updates"]:
        parts.append(f"staleness {did['staleness_mean']:.2g}, at most {did['staleness_max']}")
    if did["dropped"]:
        parts.append(f"{did['dropped']} gradients dropped")
    return "  ".join(parts)


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


def now() -> str:
    """This moment in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
