"""Reads a run's directory for its report. What cannot be read is missing, and never an error after the plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from tfdist_cli.launch.run.directory import EVENTS_FILE, RESULT_FILE
from tfdist_cli.launch.run.history import METRICS_FILE, Outcome, RunView, read_events, read_run
from tfdist_cli.launch.run.snapshot import numbers
from tfdist_cli.launch.usage import RESOURCES_FILE, TaskUsage
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE
from tfdist_cli.protocol.run_files import is_nested, number, read_bytes, read_lines, read_object, timestamp, whole

EVALUATION_FILE = "evaluation.jsonl"
LOST_FILE = "metrics_lost.jsonl"


@dataclass(frozen=True)
class Report:
    """A line of the metrics.

    Args:
        split: `train`, or the data of a validation.
        step: the global step.
        at: seconds of the run.
        epoch_done: whether the training's epoch was complete.
        values: the metrics.
        line: the whole line.
    """

    split: str
    step: int
    at: float
    epoch_done: bool
    values: Mapping[str, float]
    line: Mapping[str, Any]


@dataclass(frozen=True)
class Happened:
    """A line of the events.

    Args:
        at: seconds of the run.
        kind: the event.
        task: the task that it is about; empty if it is about the job.
        line: the whole line.
    """

    at: float
    kind: str
    task: str
    line: Mapping[str, Any]


@dataclass(frozen=True)
class RunData:
    """All that a run's directory has.

    Args:
        view: its state.
        reports: the lines of the metrics, in the order of the file.
        evaluations: those of an evaluator.
        events: its events, of all launches.
        usage: for each task what it used, with the seconds of the run.
        settings: the keys of both files as paths such as `recipe.train.epochs`, with their values as text.
        result: result.json; empty if the run has none.
        seconds: the duration of all launches, without the time between them.
        lost_lines: the number of lines of steps that were taken once more.
        damaged: names of files that could not be read.
    """

    view: RunView
    reports: tuple[Report, ...]
    evaluations: tuple[Report, ...]
    events: tuple[Happened, ...]
    usage: Mapping[str, list[tuple[float, TaskUsage]]]
    settings: Mapping[str, str]
    result: Mapping[str, Any]
    seconds: float
    lost_lines: int
    damaged: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.view.path.name

    def last(self, kind: str) -> Mapping[str, Any]:
        """The last event of a kind; empty if there is none."""
        return next((event.line for event in reversed(self.events) if event.kind == kind), {})


class RunClock:
    """Converts times of day to seconds of the run: pauses between launches do not count.

    The events have both, by the clocks of the launcher. A time between two events is between their seconds, so that
    the time for which the launcher's machine was suspended does not count either.

    Args:
        events: the lines of events.jsonl.
        view: the run's state.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]], view: RunView) -> None:
        self._times: list[datetime] = []
        self._seconds: list[float] = []
        """The seconds of the run at each of the times."""
        self.end = offset = 0.0
        for line in events:
            when, seconds = timestamp(line.get("time")), number(line.get("seconds"))
            if line.get("event") == "launch" and when:
                offset = self.end
            self.end = max(self.end, offset + (seconds or 0.0))
            if when and seconds is not None and (not self._times or when >= self._times[-1]):
                self._times.append(when)
                self._seconds.append(self.end)
        runs = view.outcome is Outcome.RUNNING
        if runs and (view.launcher is not None or view.manual):
            self.end = max(self.end, offset + view.seconds)
        elsewhere = runs and view.launcher is None and not view.manual
        self._limit = float("inf") if elsewhere or view.outcome is Outcome.LOST or not self._times else self.end

    def of(self, time: object, ahead: timedelta = timedelta()) -> float:
        """The seconds of the run at a time of day, as a line of another file has it.

        Args:
            time: the time.
            ahead: how far the clock of the host that has written it is ahead; see `ahead`.
        """
        when = timestamp(time)
        if when is None:
            return 0.0
        when -= ahead
        if not self._times:  # without events, the run begins with its first line
            self._times.append(when)
            self._seconds.append(0.0)
        last = bisect_right(self._times, when) - 1
        if last < 0:
            return 0.0
        limit = self._seconds[last + 1] if last + 1 < len(self._times) else self._limit
        return min(limit, self._seconds[last] + (when - self._times[last]).total_seconds())

    def ahead(self, times: Iterable[object]) -> timedelta:
        """How far a host's clock is ahead of the launcher's, at least; negative if it is behind.

        Args:
            times: those of the lines that the host has written, none of which is before or after the run.
        """
        found = [when for time in times if (when := timestamp(time))]
        if not found or not self._times:
            return timedelta()
        if self._limit < float("inf"):
            ended = self._times[-1] + timedelta(seconds=self._limit - self._seconds[-1])
            if max(found) > ended:
                return max(found) - ended
        return min(min(found) - self._times[0], timedelta())


def read_data(path: Path) -> RunData:
    """Reads a run's directory.

    Raises:
        UsageError: it is not the directory of a run, or cannot be read.
    """
    view = read_run(path)
    folder, damaged = view.path, list[str]()

    def lines(name: str) -> list[Mapping[str, Any]]:
        try:
            return list(read_lines(folder / name))
        except OSError:
            damaged.append(name)
            return []

    try:
        written = list(read_events(folder))
    except OSError:
        written = []
        damaged.append(EVENTS_FILE)
    clock = RunClock(written, view)
    events = tuple(_events(written))
    reports = tuple(_reports(lines(METRICS_FILE), clock))
    scored = _reports(lines(EVALUATION_FILE), clock)
    evaluations = tuple(replace(each, split=f"{each.split}, evaluator") for each in scored)
    usage: dict[str, list[tuple[float, TaskUsage]]] = {}
    for line in lines(RESOURCES_FILE):
        tasks = line.get("tasks")
        for task, each in tasks.items() if isinstance(tasks, dict) else ():
            if isinstance(each, dict):
                usage.setdefault(str(task), []).append((clock.of(line.get("time")), TaskUsage.read(each)))
    settings = {**_settings(folder, CLUSTER_FILE, damaged), **_settings(folder, RECIPE_FILE, damaged)}
    result: Mapping[str, Any] = {}
    if view.manual:
        result = view.result
    elif view.launcher is None:
        with suppress(OSError, ValueError):
            result = read_object(folder / RESULT_FILE)
    last = max([clock.end, *(report.at for report in reports), *(at for each in usage.values() for at, _ in each)])
    lost = len(lines(LOST_FILE))
    return RunData(view, reports, evaluations, events, usage, settings, result, last, lost, tuple(damaged))


def _events(lines: list[Mapping[str, Any]]) -> Iterator[Happened]:
    offset = end = 0.0
    for line in lines:
        seconds = number(line.get("seconds"))
        if seconds is None or timestamp(line.get("time")) is None:  # only the launcher writes both
            continue
        if line.get("event") == "launch":
            offset = end
        end = max(end, offset + seconds)
        yield Happened(offset + seconds, str(line.get("event")), str(line.get("task") or ""), line)


def _reports(lines: list[Mapping[str, Any]], clock: RunClock) -> Iterator[Report]:
    ahead = clock.ahead(line.get("time") for line in lines)
    for line in lines:
        step = whole(line.get("step"))
        if step is not None:
            split = str(line.get("split"))
            values = numbers(line.get("values") or line.get("metrics"))
            yield Report(split, step, clock.of(line.get("time"), ahead), line.get("epoch_done") is True, values, line)


def _settings(folder: Path, name: str, damaged: list[str]) -> dict[str, str]:
    """The keys of a YAML file, with the paths that `--set` takes."""
    try:
        value = yaml.safe_load(read_bytes(folder / name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        damaged.append(name)
        return {}
    if not isinstance(value, dict) or is_nested(value):
        damaged.append(name)
        return {}
    return dict(_flat(value, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield (
            path,
            value
            if isinstance(value, str)
            else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip(),
        )
