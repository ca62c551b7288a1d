"""What is known of each task while it runs: its last lines, and what its records said."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist_cli.launch.supervisor.events import Event, Networked, Output, Recorded, Started
from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.protocol.run_files import number
from tfdist_cli.spec.task_id import TaskId

KEPT_LINES = 10


@dataclass(frozen=True)
class Progress:
    """How far the training is, as the chief last said.

    Args:
        step: global steps done.
        total: the step it ends at; None when unknown.
        epoch: the epoch under way, from 1.
        epochs: how many there will be.
        steps_per_second: the rate now.
        metrics: each metric's value now.
        workers: steps per second of each worker.
    """

    step: int
    total: int | None
    epoch: int | None
    epochs: int | None
    steps_per_second: float
    metrics: Mapping[str, float]
    workers: Mapping[str, float]

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Progress | None:
        """Reads a `progress` record; None for one that is not as it should be, which a user's program can send."""
        step = number(record.get("step"))
        if step is None:
            return None
        total, epoch, epochs = (number(record.get(key)) for key in ("total", "epoch", "epochs"))
        return cls(
            int(step),
            None if total is None else int(total),
            None if epoch is None else int(epoch),
            None if epochs is None else int(epochs),
            number(record.get("steps_per_second")) or 0.0,
            numbers(record.get("metrics")),
            numbers(record.get("workers")),
        )


@dataclass
class TaskNews:
    """What one task has told.

    Args:
        lines: its last lines that are not empty, from both streams.
        unfinished: the line that it is writing.
        state: what it last said it does.
        error: its `error` record.
    """

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    unfinished: str = ""
    state: str = ""
    error: Mapping[str, Any] | None = None

    @property
    def last(self) -> str:
        """The last thing it said."""
        return self.unfinished or (self.lines[-1] if self.lines else "")


class RunSnapshot:
    """Keeps the news of every task; a watcher of the job."""

    def __init__(self) -> None:
        self._news: dict[TaskId, TaskNews] = {}
        self.progress: Progress | None = None
        self.result: Mapping[str, Any] = {}
        self.evaluation: Mapping[str, Any] = {}
        self.checkpoints: dict[str, int] = {}
        """Paths of checkpoints, and their steps, in the order they were saved."""
        self.exports: list[str] = []
        self.private = False
        """Whether the tasks' network is the run's own."""
        self._unsaved: list[Mapping[str, Any]] = []
        self._damaged: dict[str, str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What its tasks said of checkpoints and metrics that could not be written, or that were damaged."""
        warnings = [*self._damaged.values()]
        if self._unsaved:
            last, count = self._unsaved[-1], len(self._unsaved)
            which = "a checkpoint" if count == 1 else f"{count} checkpoints"
            reason = f"that of step {last.get('step')}: {last.get('reason')}"
            warnings.append(f"{which} could not be written, {'' if count == 1 else 'at last '}{reason}")
        return tuple(warnings)

    def of(self, task: TaskId) -> TaskNews:
        """What the task has told so far."""
        return self._news.setdefault(task, TaskNews())

    def saw(self, event: Event, state: JobState, now: float) -> None:  # noqa: ARG002
        """Takes what a task said."""
        match event:
            case Started(task):
                self._news[task] = TaskNews()  # what it said before it was started again is in its log
            case Output():
                news = self.of(event.task)
                news.lines.extend(line for line in event.lines[-KEPT_LINES:] if line.strip())
                news.unfinished = event.unfinished.strip()
            case Recorded():
                self._read(event.task, event.record)
            case Networked(private):
                self.private = private

    def _read(self, task: TaskId, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "state":
                self.of(task).state = str(record.get("state", ""))
            case "error":
                self.of(task).error = self.of(task).error or record
            case "progress":
                self.progress = Progress.read(record) or self.progress
            case "result":
                self.result = record
            case "evaluation":
                self.evaluation = record
            case _:
                self._read_of_files(record)

    def _read_of_files(self, record: Mapping[str, Any]) -> None:
        """What was written, and what could not be written or read."""
        match record["kind"]:
            case "checkpoint":
                self.checkpoints[str(record.get("path", ""))] = int(number(record.get("step")) or 0)
            case "checkpoint_failed":
                self._unsaved.append(record)
            case "checkpoint_damaged":
                text = f"the checkpoint of step {record.get('step')} is damaged, and was left out"
                self._damaged[text] = f"{text}: {record.get('reason')}"
            case "metrics_failed":
                self._damaged[str(record.get("reason"))] = str(record.get("reason"))
            case "exported":
                paths = record.get("paths")
                self.exports += [str(path) for path in paths] if isinstance(paths, list) else []


def numbers(value: object) -> dict[str, float]:
    """The entries of a map that are numbers; one that is not finite says something of a metric, too."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return {str(key): item for key, item in entries if isinstance(item, float) or number(item) is not None}
