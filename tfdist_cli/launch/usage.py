"""What tasks use of their machines, as they report it, and resources.jsonl, which keeps it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.supervisor.events import Event, RecordReceived
from tfdist_cli.launch.supervisor.state import JobState, Phase
from tfdist_cli.protocol.run_files import number
from tfdist_cli.spec.task_id import TaskId

RESOURCES_FILE = "resources.jsonl"
_SHORTEST, _LONGEST = 2.0, 60.0
"""Seconds that a line of the file is about. They grow with the run, so that the file stays small."""
_LINES = 300
"""Lines after which they have begun to grow."""


_VALUES = ("cpu", "memory", "sent", "received")


@dataclass(frozen=True)
class GpuUsage:
    """A GPU that a task sees, with what all of its processes use.

    Args:
        percent: the share of the time in which it computes; None if unknown.
        memory: bytes in use; None if unknown.
    """

    percent: float | None
    memory: float | None


@dataclass(frozen=True)
class TaskUsage:
    """What a task uses; a value that it could not measure is None.

    Args:
        cpu: the cores that it keeps busy.
        memory: resident memory in bytes.
        sent: bytes per second of its TCP connections.
        received: the same.
        gpus: the GPUs that it sees, by their names in `CUDA_VISIBLE_DEVICES`.
    """

    cpu: float | None = None
    memory: float | None = None
    sent: float | None = None
    received: float | None = None
    gpus: Mapping[str, GpuUsage] = field(default_factory=dict)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> TaskUsage:
        """Reads the `usage` of a heartbeat, or a task's entry in a line of the file; malformed values are unknown."""
        gpus = record.get("gpus")
        pairs = gpus.items() if isinstance(gpus, Mapping) else ()
        found = {str(name): [*map(number, pair)] for name, pair in pairs if isinstance(pair, list) and len(pair) == 2}
        cpu, memory, sent, received = (number(record.get(key)) for key in _VALUES)
        return cls(cpu, memory, sent, received, {name: GpuUsage(*pair) for name, pair in found.items()})

    @classmethod
    def of_heartbeat(cls, record: Mapping[str, Any]) -> TaskUsage | None:
        """Reads a heartbeat; None if it has no measurement."""
        usage = record.get("usage")
        return cls.read(usage) if isinstance(usage, Mapping) else None

    def as_json(self) -> dict[str, Any]:
        """The values in plain JSON types, as in a record."""
        gpus = {name: [gpu.percent, gpu.memory] for name, gpu in self.gpus.items()}
        return {
            "cpu": self.cpu,
            "memory": self.memory,
            "sent": self.sent,
            "received": self.received,
            **({"gpus": gpus} if gpus else {}),
        }


class UsageLog:
    """Writes resources.jsonl, a line for all tasks every few seconds; a watcher of the job.

    A file that cannot be written does not end the job: the first problem is kept and reported at the end.

    Args:
        folder: the run's directory.
        attempt: the run's attempt with which the launch begins, from 1.
        clock: the time of day.
    """

    def __init__(
        self, folder: Path, attempt: int, clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    ) -> None:
        self._path = folder / RESOURCES_FILE
        self._first_attempt = attempt
        self._clock = clock
        self._reported: dict[TaskId, list[TaskUsage]] = {}
        self._written_at = 0.0
        self.problem: str | None = None

    def on_event(self, event: Event, state: JobState, now: float) -> None:
        """Collects what tasks report, and writes a line when it is due."""
        if isinstance(event, RecordReceived) and event.record["kind"] == "beat" and event.task in state.tasks:
            usage = TaskUsage.of_heartbeat(event.record)
            self._reported.setdefault(event.task, []).extend([usage] if usage else [])
        period = min(_LONGEST, max(_SHORTEST, now / _LINES))
        if any(self._reported.values()) and (now - self._written_at >= period or state.phase is Phase.ENDED):
            self._write(self._first_attempt - 1 + state.attempt, now)

    def _write(self, attempt: int, now: float) -> None:
        line = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "seconds": round(now, 3),
            "attempt": attempt,
            "tasks": {str(task): _mean(usages).as_json() for task, usages in self._reported.items() if usages},
        }
        self._reported, self._written_at = {}, now
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(to_json(line) + os.linesep)
        except OSError as error:
            self.problem = self.problem or f"{self._path} is not complete: {error.strerror}"


def total_usage(usages: Sequence[TaskUsage]) -> TaskUsage | None:
    """What several tasks use together, without their GPUs, which they may share; None if there are none."""
    if not usages:
        return None
    known = [[value for usage in usages if (value := getattr(usage, key)) is not None] for key in _VALUES]
    cpu, memory, sent, received = (sum(values) if values else None for values in known)
    return TaskUsage(cpu, memory, sent, received)


def _mean(usages: list[TaskUsage]) -> TaskUsage:
    """The means of rates, and the largest memory."""
    rates = (_mean_of([getattr(each, key) for each in usages], 3) for key in ("cpu", "sent", "received"))
    cpu, sent, received = rates
    gpus: dict[str, GpuUsage] = {}
    for name in {name: None for usage in usages for name in usage.gpus}:
        each = [usage.gpus[name] for usage in usages if name in usage.gpus]
        gpus[name] = GpuUsage(_mean_of([gpu.percent for gpu in each], 1), _largest([gpu.memory for gpu in each]))
    return TaskUsage(cpu, _largest([usage.memory for usage in usages]), sent, received, gpus)


def _mean_of(values: list[float | None], digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), digits) if known else None


def _largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
