"""events.jsonl: the events of a run and their causes, a line for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.run.report import cause_of, describe_exit, resize_outcome, signal_name
from tfdist_cli.launch.supervisor.events import (
    Event,
    Exited,
    NetworkReady,
    ProfileAccepted,
    ProfileRefused,
    RecordReceived,
    RequestAnswered,
    ResizeAccepted,
    SignalReceived,
    Started,
)
from tfdist_cli.launch.supervisor.state import JobState, LostTask, Phase, Resize
from tfdist_cli.protocol.records import FREQUENT
from tfdist_cli.spec.task_id import TaskId

_RESERVED = (
    *("launch", "started", "exited", "loss", "kill", "phase", "network", "signal", "scale", "scaled", "profile"),
    "record",
)
"""Events that only the launcher may write. A program's record of such a kind is written as an event `record`."""


def _utc() -> datetime:
    return datetime.now(timezone.utc)


class EventLog:
    """Writes the events of one launch; a watcher of the job.

    A log that cannot be written, for example on a full disk, does not end the job: the first such problem is kept and
    reported at the end.

    Args:
        path: the file; lines are appended to it.
        attempt: the run's attempt with which the launch begins, from 1.
        clock: the time of day.
    """

    def __init__(self, path: Path, attempt: int, clock: Callable[[], datetime] = _utc) -> None:
        self._path = path
        self._attempt = attempt
        self._clock = clock
        self._first_attempt = attempt
        self._phase = Phase.RUNNING
        self._lost_tasks = 0
        self._finished_resizes = 0
        self._killed: set[TaskId] = set()
        self._is_cut = _is_cut(path)
        """Whether the last line may be incomplete."""
        self.problem: str | None = None

    def begin(self, provenance: Mapping[str, Any]) -> None:
        """Writes that a launch begins. The seconds of the following lines count from here.

        Args:
            provenance: the launcher's versions, and the commit.
        """
        self.write({"event": "launch", **provenance}, 0.0)

    def job_failed(self, cause: str, now: float) -> None:
        """Writes that an error of the launcher has ended the job.

        Args:
            cause: the error.
            now: seconds since the launch began.
        """
        self.write({"event": "phase", "from": self._phase.value, "phase": Phase.ENDED.value, "cause": cause}, now)

    def on_event(self, event: Event, state: JobState, now: float) -> None:
        """Writes the event and the changes of the job's state."""
        self._attempt = self._first_attempt - 1 + state.attempt
        line = _line_of(event, state)
        if line:
            self.write(line, now)
        for lost in state.lost_tasks[self._lost_tasks :]:
            self.write({"event": "loss", "task": str(lost.task), "cause": cause_of(lost), **_restart(lost)}, now)
        self._lost_tasks = len(state.lost_tasks)
        finished = [resize for resize in state.resizes if resize.trained_at is not None]
        for resize in finished[self._finished_resizes :]:
            self.write(_scaled(resize, state), now)
        self._finished_resizes = len(finished)
        self._write_killed(state, now)
        if state.phase is not self._phase:
            cause = _phase_cause(event, state)
            self.write({"event": "phase", "from": self._phase.value, "phase": state.phase.value, "cause": cause}, now)
            self._phase = state.phase

    def _write_killed(self, state: JobState, now: float) -> None:
        """Writes which tasks were killed because they were stalled."""
        killed = set(state.stalled)
        for name in sorted(killed - self._killed, key=str):
            self.write({"event": "kill", "task": str(name), "cause": state.tasks[name].stall_reason}, now)
        self._killed = killed

    def write(self, line: Mapping[str, Any], now: float) -> None:
        """Writes a line.

        Args:
            line: `event`, and its fields.
            now: seconds since the launch began.
        """
        stamp = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "seconds": round(now, 3),
            "attempt": self._attempt,
        }
        # First the stamp in front, for people. Then once more, so that a task's record cannot override it.
        text = (os.linesep if self._is_cut else "") + to_json({**stamp, **line, **stamp}) + os.linesep
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
            self._is_cut = False
        except OSError as error:
            self._is_cut = True
            self.problem = self.problem or f"{self._path} is not complete: {error.strerror}"


def _is_cut(path: Path) -> bool:
    """Whether an earlier launcher has left an incomplete line at the end of the file."""
    with suppress(OSError), path.open("rb") as file:  # a file that cannot be read is reported when it is written
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read() not in (b"", b"\n")
    return False


def _line_of(event: Event, state: JobState) -> dict[str, Any]:
    """The line for an event; empty for an event that is not logged."""
    match event:
        case Started(task, pid):
            return {"event": "started", "task": str(task), "pid": pid}
        case Exited(task, code):
            exited = state.tasks[task]
            status = exited.status.value
            return {
                "event": "exited",
                "task": str(task),
                "code": code,
                "status": status,
                "cause": describe_exit(exited),
            }
        case RecordReceived(task, record) if record["kind"] not in FREQUENT:
            fields = {key: value for key, value in record.items() if key != "kind"}
            if record["kind"] in _RESERVED:
                return {"event": "record", "task": str(task), "record": fields | {"kind": record["kind"]}}
            return {**fields, "event": record["kind"], "task": str(task)}
    return _line_of_job(event)


def _line_of_job(event: Event) -> dict[str, Any]:
    """The line for an event of the whole job."""
    match event:
        case NetworkReady(private, text):
            return {"event": "network", "private": private, "text": text}
        case SignalReceived(signum):
            return {"event": "signal", "signal": signal_name(signum)}
        case ResizeAccepted() | RequestAnswered():
            return _answer(event)
        case ProfileAccepted(task, order):
            line = {"event": "profile", "request": order.request, "task": str(task), "answer": "accepted"}
            return line | {"path": order.path, "duration": order.seconds}
        case ProfileRefused(request, task, reason, hint, code):
            line = {"event": "profile", "request": request, "task": str(task), "answer": "refused"}
            return line | {"reason": reason, "hint": hint, "code": code}
    return {}


def _answer(event: ResizeAccepted | RequestAnswered) -> dict[str, Any]:
    """The answer to a request."""
    line = {"event": "scale", "request": event.request, "replicas": event.replicas}
    if isinstance(event, ResizeAccepted):
        names = {"joins": event.joins, "leaves": event.leaves}
        lists = {key: [str(task) for task in tasks] for key, tasks in names.items()}
        return line | {"answer": "accepted", "live": event.is_live, **lists} | _reason(event.because)
    if event.answer == "refused":
        return line | {"answer": "refused", "reason": event.reason, "hint": event.hint, "code": event.code}
    live = {"live": event.live} if event.answer == "possible" else {}
    return line | {"answer": event.answer, **live} | _reason(event.reason)


def _reason(text: str) -> dict[str, str]:
    return {"reason": text} if text else {}


def _scaled(resize: Resize, state: JobState) -> dict[str, Any]:
    """A finished resize: it `took` the seconds from the request until the training had its new size."""
    line = {"event": "scaled", "request": resize.wanted.request, "replicas": resize.wanted.replicas}
    return line | {"resumed": resize.resumed, "step": state.attempt_step, **resize_outcome(resize)}


def _restart(lost: LostTask) -> dict[str, Any]:
    return {"step": lost.step, "restarts": "the task" if lost.alone else "the job", "delay": lost.delay}


def _phase_cause(event: Event, state: JobState) -> str:
    match event:
        case Exited(task, _):
            return f"{task}: {describe_exit(state.tasks[task])}"
        case SignalReceived(signum):
            return signal_name(signum)
        case ResizeAccepted():
            return "a request for other numbers of tasks"
    return "timeout"
