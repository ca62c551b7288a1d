"""The values in the files of a run, with the names that every tracker gives them.

A measurement belongs to a series. `train`: each report of the training. `epoch`: the reports at the ends of epochs.
`validation`, `test` or another split: evaluations by the tasks that train. `evaluator`: those of evaluators.
`worker-0`: what a worker does. `system/worker-0`: what a task uses of its machine; its steps are the seconds since the
first measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.protocol.run_files import number, read_lines, timestamp, whole

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
RESOURCES_FILE = "resources.jsonl"
SOURCES = (METRICS_FILE, EVALUATION_FILE, RESOURCES_FILE)
SYSTEM = "system/"
_TRAIN = "train"


@dataclass(frozen=True)
class Measurement:
    """One value.

    Args:
        series: what was measured: `train`, a split, `worker-0`, `system/worker-0`.
        name: the name of the metric.
        step: the global step; in a series of the system, seconds since the first measurement.
        value: the value, as in the file.
        time: when, in seconds since the epoch of Unix.
    """

    series: str
    name: str
    step: int
    value: float
    time: float


class Reader:
    """Turns the lines of a run's files into measurements.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._resources = run / RESOURCES_FILE
        self._first_usage: float | None = None

    def read(self, source: str, line: Mapping[str, Any]) -> Iterator[Measurement]:
        """Yields the measurements of a line; none for a damaged one.

        Args:
            source: one of `SOURCES`.
            line: the line.
        """
        when = timestamp(line.get("time"))
        if when is None:
            return
        time = when.timestamp()
        if source == RESOURCES_FILE:
            yield from self._usage(line, time)
            return
        step = whole(line.get("step"))
        if step is None:
            return
        if source == EVALUATION_FILE:
            groups = [("evaluator", _values(line.get("values") or line.get("metrics")))]
        else:
            groups = list(_report(line))
        for series, values in groups:
            for name, value in values.items():
                yield Measurement(series, name, step, value, time)

    def _usage(self, line: Mapping[str, Any], time: float) -> Iterator[Measurement]:
        if self._first_usage is None:  # that of the file: an earlier process may have read its beginning
            times = (timestamp(each.get("time")) for each in read_lines(self._resources))
            self._first_usage = next((each.timestamp() for each in times if each), time)
        seconds = max(0, round(time - self._first_usage))
        for task, usage in _items(line.get("tasks")):
            values = _values(usage)
            for gpu, pair in _items(usage.get("gpus") if isinstance(usage, Mapping) else None):
                found = pair if isinstance(pair, list) and len(pair) == 2 else [None, None]
                values |= _values({f"gpu_{gpu}_percent": found[0], f"gpu_{gpu}_memory": found[1]})
            for name, value in values.items():
                yield Measurement(f"{SYSTEM}{_task(task)}", name, seconds, value, time)


def _report(line: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    split, values = str(line.get("split")), _values(line.get("values"))
    if split != _TRAIN:
        yield split, values
        return
    values |= _values({"steps_per_second": line.get("steps_per_second")})
    yield _TRAIN, values
    if line.get("epoch_done") is True:
        yield "epoch", values | _values({"epoch": line.get("epoch")})
    for worker, each in _items(line.get("workers")):
        yield _task(worker), _values(each)
    for key, name in (("worker_steps_per_second", "steps_per_second"), ("examples_per_second", "examples_per_second")):
        for worker, rate in _items(line.get(key)):
            yield _task(worker), _values({name: rate})


def _items(value: object) -> Iterator[tuple[str, Any]]:
    yield from value.items() if isinstance(value, Mapping) else ()


def _values(value: object) -> dict[str, float]:
    """The numbers in a map; also those that are not finite, which a training that diverges reports."""
    return {name: float(each) for name, each in _items(value) if isinstance(each, float) or number(each) is not None}


def _task(name: str) -> str:
    return name.replace(":", "-")
