"""Progress reports of a training: lines in metrics.jsonl, records for the launcher, log lines for people."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.engine.base import Engine, Execution, WorkerReport
from tfdist_cli.train.engine.step_timer import by_name as phase_report
from tfdist_cli.train.trainer.config.training import OPEN_END
from tfdist_cli.train.trainer.metrics_file import MetricsFile

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
REPORT_SECONDS = 1.0
"""Seconds between two reports within an epoch."""

_WORKERS_PER_RECORD = 50
"""Workers in a record: it has to fit into one write."""

T = TypeVar("T")
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class _Counts:
    """The counts at one moment, from which rates are computed."""

    time: float
    done: int
    steps: dict[str, int]
    examples: dict[str, int]


@dataclass
class _Presence:
    """When a worker's executions ended: from the first one, after which it had taken `begun` steps, to the last one."""

    first: float
    begun: int
    last: float

    def rate(self, steps: int) -> float | None:
        """Returns the worker's steps per second, without the time before its first steps, in which it starts."""
        seconds = self.last - self.first
        return round((steps - self.begun) / seconds, 2) if seconds > 0 else None


@dataclass
class WorkerTotals:
    """Sums over a worker's reports.

    Args:
        loss: the sum of its batches' losses.
        batches: its batches.
        updates: the updates that its gradients are part of.
        staleness: the sum of these updates' staleness: other updates since the worker read the parameters.
        max_staleness: the largest staleness.
        dropped: its gradients that were dropped because they were too late.
    """

    loss: float = 0.0
    batches: int = 0
    updates: int = 0
    staleness: int = 0
    max_staleness: int = 0
    dropped: int = 0

    def add(self, report: WorkerReport) -> None:
        """Adds the report of an execution."""
        self.loss += report.loss
        self.batches += report.batches
        self.updates += len(report.staleness)
        self.staleness += sum(report.staleness)
        self.max_staleness = max(self.max_staleness, *report.staleness, 0)
        self.dropped += report.dropped

    def values(self) -> dict[str, Any]:
        """Returns the values for metrics.jsonl; a mean is null if there is nothing to average."""
        return {
            "loss": self.loss / self.batches if self.batches else None,
            "updates": self.updates,
            "staleness_mean": self.staleness / self.updates if self.updates else None,
            "staleness_max": self.max_staleness,
            "dropped": self.dropped,
        }


class ProgressReporter:
    """Counts steps and examples, and reports them on the chief.

    Args:
        run_dir: the folder of metrics.jsonl; None for no file.
        engine: runs the steps.
        first: the global step at which this launch starts.
        total: the global step at which the training ends.
        epochs: the number of epochs.
    """

    def __init__(self, run_dir: Path | None, *, engine: Engine, first: int, total: int, epochs: int) -> None:
        self._active = engine.is_chief
        self._file = MetricsFile(run_dir / METRICS_FILE) if run_dir and self._active else None
        self._first = first
        self._total = total
        self._epochs = epochs
        self._done = 0
        self._steps: dict[str, int] = {}
        self._earlier: dict[str, int] = {}
        self._interval: dict[str, WorkerTotals] = defaultdict(WorkerTotals)
        self._workers: dict[str, WorkerTotals] = defaultdict(WorkerTotals)
        self._phases: dict[str, Any] = {}
        self._gap: int | None = None
        self._examples: dict[str, int] = {}
        self._presence: dict[str, _Presence] = {}
        self._step = first
        self._metrics: dict[str, tuple[int, dict[str, float]]] = {}
        self._begun = time.monotonic()
        self._last = self._epoch = self._counts()

    def begin(self, step: int, epochs_recorded: int, local_steps: Mapping[str, int] | None = None) -> None:
        """Removes the lines of steps that are trained again from metrics.jsonl.

        Args:
            step: the global step at which the training begins.
            epochs_recorded: epochs whose end is recorded.
            local_steps: the steps of each worker in earlier launches.
        """
        self._first = self._step = step
        self._earlier = dict(local_steps or {})
        if self._file:
            self._file.truncate(self._first, epochs_recorded)

    def set_length(self, total: int, epochs: int) -> None:
        """Sets the global step at which the training ends, and the number of epochs."""
        self._total, self._epochs = total, epochs

    @property
    def local_steps(self) -> dict[str, int]:
        """The steps that each worker has taken, in earlier launches too."""
        return {
            name: self._earlier.get(name, 0) + self._steps.get(name, 0) for name in {**self._earlier, **self._steps}
        }

    def count(self, execution: Execution) -> None:
        """Adds the steps and examples of an execution."""
        self._done += len(execution.losses)
        self._gap = execution.gap
        for task, counted in execution.phases.items():
            self._phases[task] = self._phases.get(task, 0.0) + counted
        for worker, report in execution.reports.items():
            self._interval[worker].add(report)
            self._workers[worker].add(report)
        for counts, more in ((self._steps, execution.steps), (self._examples, execution.examples)):
            for worker, number in more.items():
                counts[worker] = counts.get(worker, 0) + number
        for worker in execution.steps:
            first = _Presence(execution.ended, self._steps[worker], execution.ended)
            self._presence.setdefault(worker, first).last = execution.ended

    def due(self) -> bool:
        """Returns whether to report within an epoch now; the first steps at once, as a sign that the training runs."""
        is_first = self._step == self._first
        return self._active and (is_first or time.monotonic() - self._last.time >= REPORT_SECONDS)

    def report(self, split: str, step: int, epoch: int, values: dict[str, Any], *, done: bool = False) -> None:
        """Writes a line to metrics.jsonl, and sends a record to the launcher.

        Args:
            split: the data of the metrics: `train`, or the name of another split.
            step: the global step.
            epoch: the current epoch, counted from 1.
            values: the metrics by name, as `MetricTotals.logs` returns them.
            done: whether the epoch is complete.
        """
        if not self._active:
            return
        values = flatten_metrics(values)
        rates: dict[str, Any] = {}
        if split == "train":
            rates = self._rates(self._epoch if done else self._last)
            rates["workers"] = self._worker_values(self._interval)
            if self._phases:
                rates["phases"] = phase_report(self._phases)
            self._interval.clear()
            self._last = self._counts()
        self._step = step
        self._metrics[split] = (step, values)
        line = {"time": utc_now(), "split": split, "step": step, "epoch": epoch, "epoch_done": done, "values": values}
        if self._file:
            self._file.append(line | rates)
        if split == "train":
            first, *others = _chunks(rates["worker_steps_per_second"]) or [{}]
            emit(
                "progress",
                step=step,
                total=self._total if self._total < OPEN_END else None,
                epoch=epoch,
                epochs=self._epochs,
                steps_per_second=rates["steps_per_second"],
                metrics=values,
                workers=first,
            )
            for chunk in others:
                emit("rates", workers=chunk)
        if done or split != "train":
            rate = f"  {rates['steps_per_second']:.1f} steps/s" if rates else ""
            metrics = format_metrics(values) if split == "train" else f"{split}: {format_metrics(values)}"
            total = self._total if self._total < OPEN_END else "unknown"
            log.info("epoch %d/%d  step %d/%s  %s%s", epoch, self._epochs, step, total, metrics, rate)

    def begin_epoch(self) -> None:
        """Starts the interval over which an epoch's rates are measured."""
        self._epoch = self._last = self._counts()

    def finish(self) -> None:
        """Sends the result to the launcher, and logs each worker's totals."""
        if self._active:
            self._send_workers()
            emit(
                "result",
                first=self._first,
                step=self._step,
                metrics=self._final_metrics(),
                seconds=round(time.monotonic() - self._begun, 3),
                examples=sum(self._examples.values()),
            )
            for worker, totals in self._worker_values(self._workers).items():
                log.info("%s", _format_worker(worker, totals))
            if self._gap is not None:
                log.info("no worker was more than %d steps ahead of the slowest", self._gap)

    def _send_workers(self) -> None:
        """Sends what each worker did in this launch to the launcher."""
        for chunk in _chunks(self._steps):
            figures = {
                name: [steps, self._examples.get(name, 0), self._presence[name].rate(steps)]
                for name, steps in chunk.items()
            }
            emit("workers", workers=figures)

    def _worker_values(self, workers: Mapping[str, WorkerTotals]) -> dict[str, dict[str, Any]]:
        """Returns each worker's values for metrics.jsonl, with the steps that it has taken."""
        steps = self.local_steps
        return {name: {"local_step": steps.get(name, 0), **totals.values()} for name, totals in sorted(workers.items())}

    def _final_metrics(self) -> dict[str, float]:
        """Returns the last epoch's metrics, and those of the validations after the last step."""
        final: dict[str, float] = {}
        for split, (step, values) in self._metrics.items():
            prefix = "" if split == "train" else f"{split}_"
            if step == self._step:
                final |= {f"{prefix}{name}": value for name, value in values.items()}
        return final

    def _rates(self, since: _Counts) -> dict[str, Any]:
        """Returns the rates since some counts; a step that workers take together is one step."""
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

    def _counts(self) -> _Counts:
        return _Counts(time.monotonic(), self._done, dict(self._steps), dict(self._examples))


def _chunks(workers: Mapping[str, T]) -> list[dict[str, T]]:
    """Splits the values of workers into as many as fit into a record, in the order of the workers' numbers."""
    names = sorted(workers, key=lambda name: (len(name), name))  # worker:2 before worker:10
    begins = range(0, len(names), _WORKERS_PER_RECORD)
    return [{name: workers[name] for name in names[begin : begin + _WORKERS_PER_RECORD]} for begin in begins]


def _format_worker(worker: str, totals: Mapping[str, Any]) -> str:
    """Returns `worker:0  1375 steps  loss 0.31  staleness 1.0, at most 3`."""
    parts = [worker, f"{totals['local_step']} steps"]
    if totals["loss"] is not None:
        parts.append(f"loss {totals['loss']:.4g}")
    if totals["updates"]:
        parts.append(f"staleness {totals['staleness_mean']:.2g}, at most {totals['staleness_max']}")
    if totals["dropped"]:
        parts.append(f"{totals['dropped']} gradients dropped")
    return "  ".join(parts)


def enable_logging() -> None:
    """Logs to stderr, unless the program has set up a handler for tfdist's log."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


@contextmanager
def progress_logged(wanted: bool) -> Iterator[None]:
    """Within the context, only warnings are logged unless progress is wanted."""
    level = log.level
    if not wanted:
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def flatten_metrics(values: dict[str, Any]) -> dict[str, float]:
    """Returns metrics with one entry for each element of an array: `f1_score[0]`, `f1_score[1]`, ..."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, float):
            flat[name] = value
        else:
            flat |= {f"{name}{list(index)}": float(element) for index, element in np.ndenumerate(value)}
    return flat


def format_metrics(values: dict[str, float]) -> str:
    """Returns `loss 0.123  accuracy 0.97`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def utc_now() -> str:
    """Returns the current time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
