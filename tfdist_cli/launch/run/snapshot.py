"""What is known of each task while it runs: its last lines of output, and its last records."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tfdist_cli.launch.supervisor.events import Event, NetworkReady, Output, RecordReceived, Started
from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.launch.usage import TaskUsage
from tfdist_cli.protocol.run_files import number
from tfdist_cli.spec.task_id import TaskId

KEPT_LINES = 10


@dataclass(frozen=True)
class Progress:
    """The chief's last progress record.

    Args:
        step: global steps done.
        total: the last step of the training; None if unknown.
        epoch: the current epoch, from 1.
        epochs: the number of epochs.
        steps_per_second: the current rate.
        metrics: each metric's current value.
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
        """Reads a `progress` record. Returns None for a malformed one, which a user's program may send."""
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


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker did in a training.

    Args:
        steps: the steps that it took.
        examples: the examples in them that were trained on.
        steps_per_second: from its first steps to its last ones; None if it took too few to measure this.
    """

    steps: int
    examples: int
    steps_per_second: float | None

    @classmethod
    def read(cls, record: object) -> WorkerFigures | None:
        """Reads an entry of a `workers` record. Returns None for a malformed one."""
        values = [number(each) for each in record] if isinstance(record, list) else []
        match values:
            case [float() | int() as steps, float() | int() as examples, rate]:
                return cls(int(steps), int(examples), rate)
        return None


@dataclass
class TaskSnapshot:
    """What is known of one task.

    Args:
        lines: its last nonempty lines, from both streams.
        unfinished: the incomplete line at the end of its output.
        state: the state that it last reported.
        evaluated: how far its evaluation is: `120 of 500 batches`; empty if it has not reported that.
        error: its `error` record.
        usage: what it last reported to use; None before.
    """

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    unfinished: str = ""
    state: str = ""
    evaluated: str = ""
    error: Mapping[str, Any] | None = None
    usage: TaskUsage | None = None

    @property
    def last(self) -> str:
        """The last line of its output."""
        return self.unfinished or (self.lines[-1] if self.lines else "")


class RunSnapshot:
    """Collects the output and the records of every task; a watcher of the job."""

    def __init__(self) -> None:
        self._tasks: dict[TaskId, TaskSnapshot] = {}
        self.progress: Progress | None = None
        self.result: Mapping[str, Any] = {}
        self.workers: dict[str, WorkerFigures] = {}
        self.evaluation: Mapping[str, Any] = {}
        self.checkpoints: dict[str, int] = {}
        """Paths of checkpoints, and their steps, in the order they were saved."""
        self.exports: list[str] = []
        self.private = False
        """Whether the tasks have a private network."""
        self._unsaved: list[Mapping[str, Any]] = []
        self._damaged: dict[str, str] = {}

    @property
    def last_step(self) -> int | None:
        """The last global step that is known: the training's last one, a checkpoint's or that of the last progress."""
        known = [*self.checkpoints.values(), *([self.progress.step] if self.progress else [])]
        found = number(self.result.get("step"))
        return max(known, default=None) if found is None else int(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that tasks reported: checkpoints and metrics that could not be written, damaged checkpoints."""
        warnings = [*self._damaged.values()]
        if self._unsaved:
            last, count = self._unsaved[-1], len(self._unsaved)
            which = "a checkpoint" if count == 1 else f"{count} checkpoints"
            reason = f"that of step {last.get('step')}: {last.get('reason')}"
            warnings.append(f"{which} could not be written, {'' if count == 1 else 'the last one '}{reason}")
        return tuple(warnings)

    def of(self, task: TaskId) -> TaskSnapshot:
        """What is known of the task so far."""
        return self._tasks.setdefault(task, TaskSnapshot())

    def on_event(self, event: Event, state: JobState, now: float) -> None:  # noqa: ARG002
        """Takes the data of an event."""
        match event:
            case Started(task):
                self._tasks[task] = TaskSnapshot()  # the log keeps the output from before a restart
            case Output():
                task_snapshot = self.of(event.task)
                task_snapshot.lines.extend(line for line in event.lines[-KEPT_LINES:] if line.strip())
                task_snapshot.unfinished = event.unfinished.strip()
            case RecordReceived():
                self._read(event.task, event.record)
            case NetworkReady(private):
                self.private = private

    def _read(self, task: TaskId, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "state":
                self.of(task).state, self.of(task).evaluated = str(record.get("state", "")), ""
            case "evaluated":
                self.of(task).evaluated = _evaluated(record)
            case "error":
                self.of(task).error = self.of(task).error or record
            case "beat":
                self.of(task).usage = TaskUsage.of_heartbeat(record) or self.of(task).usage
            case "progress":
                self.progress = Progress.read(record) or self.progress
            case "rates" if self.progress:
                rates = {**self.progress.workers, **numbers(record.get("workers"))}
                self.progress = replace(self.progress, workers=rates)
            case "workers":
                workers = record.get("workers")
                entries = workers.items() if isinstance(workers, dict) else ()
                self.workers |= {name: read for name, each in entries if (read := WorkerFigures.read(each))}
            case "result":
                self.result = record
            case "evaluation":
                self.evaluation = record
            case _:
                self._read_file_record(record)

    def _read_file_record(self, record: Mapping[str, Any]) -> None:
        """Reads a record about a file that was written, or that could not be written or read."""
        match record["kind"]:
            case "checkpoint":
                self.checkpoints[str(record.get("path", ""))] = int(number(record.get("step")) or 0)
            case "checkpoint_failed":
                self._unsaved.append(record)
            case "checkpoint_damaged":
                text = f"the checkpoint of step {record.get('step')} is damaged and was skipped"
                self._damaged[text] = f"{text}: {record.get('reason')}"
            case "metrics_failed":
                self._damaged[str(record.get("reason"))] = str(record.get("reason"))
            case "exported":
                paths = record.get("paths")
                known = [str(path) for path in paths] if isinstance(paths, list) else []
                self.exports += [path for path in known if path not in self.exports]  # a better one takes its place


def _evaluated(record: Mapping[str, Any]) -> str:
    """Returns the text of an `evaluated` record; empty for a malformed one."""
    batches, total = number(record.get("batches")), number(record.get("total"))
    if batches is None:
        return ""
    return f"{batches:.0f} batches" if total is None else f"{batches:.0f} of {total:.0f} batches"


def numbers(value: object) -> dict[str, float]:
    """The entries of a map that are numbers, including infinite ones and NaN, which are valid values of a metric."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return {str(key): item for key, item in entries if isinstance(item, float) or number(item) is not None}
