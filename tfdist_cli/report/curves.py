"""The lines of a run's charts: metrics, rates, staleness and resources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tfdist_cli.launch.run.snapshot import numbers
from tfdist_cli.launch.usage import TaskUsage
from tfdist_cli.protocol.run_files import number
from tfdist_cli.report.chart import Series
from tfdist_cli.report.data import Report, RunData

TRAIN = "train"
MOST_LINES = 10
"""Lines of a chart; of more tasks, the least, the mean and the largest value are drawn."""
_PARTS = 200
"""Points of such lines."""

Points = list[tuple[float, float]]


def metric_names(run: RunData) -> list[str]:
    """The names of its metrics, the loss first."""
    names = {name: None for report in (*run.reports, *run.evaluations) for name in report.values}
    return sorted(names, key=lambda name: name != "loss")


def metric_curves(run: RunData, metric: str) -> dict[str, Points]:
    """The values of a metric by the global step, for each split."""
    found: dict[str, list[Report]] = {}
    for report in (*run.reports, *run.evaluations):
        if metric in report.values:
            found.setdefault(report.split, []).append(report)
    if TRAIN in found:
        found[TRAIN] = training_reports(found[TRAIN])
    return {split: [(report.step, report.values[metric]) for report in each] for split, each in found.items()}


def training_reports(reports: Sequence[Report]) -> list[Report]:
    """The ends of epochs, or, of a run with few of them, all reports: within an epoch, metrics are those so far."""
    ends = [report for report in reports if report.epoch_done]
    return ends if len(ends) > 1 else list(reports)


def rate_curve(run: RunData) -> Points:
    """The steps per second of the whole job."""
    return [
        (report.at, rate)
        for report in run.reports
        if report.split == TRAIN and (rate := number(report.line.get("steps_per_second"))) is not None
    ]


def worker_rates(run: RunData) -> list[Series]:
    """The steps per second of each worker."""
    return task_series(_by_worker(run, lambda line: numbers(line.get("worker_steps_per_second"))))


def staleness(run: RunData) -> list[Series]:
    """The mean staleness of each worker's updates."""
    return task_series(_by_worker(run, lambda line: _of_workers(line, "staleness_mean")))


def dropped(run: RunData) -> dict[str, float]:
    """The number of dropped gradients of each worker."""
    total: dict[str, float] = {}
    for report in run.reports:
        for name, count in _of_workers(report.line, "dropped").items():
            total[name] = total.get(name, 0.0) + count
    return total


def usage_series(run: RunData, value: Callable[[TaskUsage], float | None]) -> list[Series]:
    """What each task used."""
    points = {
        task: [(at, found) for at, usage in usages if (found := value(usage)) is not None]
        for task, usages in run.usage.items()
    }
    return task_series({task: each for task, each in sorted(points.items(), key=lambda item: _order(item[0])) if each})


def task_series(points: Mapping[str, Points]) -> list[Series]:
    """A line for each task; of many tasks, the least, the mean and the largest value."""
    names = sorted(points, key=_order)
    if len(names) <= MOST_LINES:
        return [Series(name, points[name], index) for index, name in enumerate(names)]
    return _summary(list(points.values()), len(names))


def _summary(lines: Sequence[Points], count: int) -> list[Series]:
    begin, end = min(line[0][0] for line in lines), max(line[-1][0] for line in lines)
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for line in lines:
        for at, value in line:
            if math.isfinite(value):
                parts[min(_PARTS - 1, int((at - begin) / max(end - begin, 1e-9) * _PARTS))].append(value)
    times = [begin + (index + 0.5) * (end - begin) / _PARTS for index in range(_PARTS)]
    kept = [(at, part) for at, part in zip(times, parts, strict=True) if part]
    return [
        Series(f"largest of {count} tasks", [(at, max(part)) for at, part in kept], 0, dashed=True),
        Series("mean", [(at, sum(part) / len(part)) for at, part in kept], 0),
        Series("least", [(at, min(part)) for at, part in kept], 8, dashed=True),
    ]


def _by_worker(run: RunData, values: Callable[[Mapping[str, object]], Mapping[str, float]]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for report in run.reports:
        if report.split == TRAIN:
            for name, value in values(report.line).items():
                found.setdefault(name, []).append((report.at, value))
    return found


def _of_workers(line: Mapping[str, object], key: str) -> dict[str, float]:
    workers = line.get("workers")
    entries: Iterable[tuple[str, object]] = workers.items() if isinstance(workers, dict) else ()
    values = ((name, number(each.get(key))) for name, each in entries if isinstance(each, dict))
    return {name: value for name, value in values if value is not None}


def _order(task: str) -> tuple[str, int, str]:
    """The order of tasks: worker:2 before worker:10."""
    role, _, index = task.partition(":")
    return role, int(index) if index.isdecimal() else -1, task
