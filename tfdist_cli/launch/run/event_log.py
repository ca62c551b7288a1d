"""events.jsonl: what happened in a run and why, a line for each transition."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tfdist_cli.launch.run.documents import to_json
from tfdist_cli.launch.run.report import cause_of, describe_end, signal_name
from tfdist_cli.launch.supervisor.events import (
    Answered,
    Event,
    Exited,
    Networked,
    Recorded,
    Resized,
    Signalled,
    Started,
)
from tfdist_cli.launch.supervisor.state import JobState, Loss, Phase, Resize
from tfdist_cli.spec.task_id import TaskId

_FREQUENT = ("progress", "beat")
"""Kinds of records that are no transitions; metrics.jsonl has the progress."""

_OWN = ("launch", "started", "exited", "loss", "kill", "phase", "network", "signal", "scale", "scaled", "record")
"""What the launcher itself tells of; a program's record of such a kind must not pass for it."""


def _utc() -> datetime:
    return datetime.now(timezone.utc)


class EventLog:
    """Writes the events of one attempt; a watcher of the job.

    A journal that cannot be written, on a full disk say, ends nothing: the first such problem is kept, and told at
    the end.

    Args:
        path: the file; lines are added to it.
        attempt: which start of the run the launch begins with, from 1.
        clock: the time of day.
    """

    def __init__(self, path: Path, attempt: int, clock: Callable[[], datetime] = _utc) -> None:
        self._path = path
        self._attempt = attempt
        self._clock = clock
        self._launch = attempt
        self._phase = Phase.RUNNING
        self._losses = 0
        self._trained = 0
        self._killed: set[TaskId] = set()
        self._cut = _is_cut(path)
        """Whether the last line may be there in part."""
        self.problem: str | None = None

    def begin(self) -> None:
        """Writes that a launch begins: what follows is its own, and its seconds count from here."""
        self._write({"event": "launch"}, 0.0)

    def break_off(self, cause: str, now: float) -> None:
        """Writes that the job has ended of what no event tells.

        Args:
            cause: why.
            now: seconds since the launch began.
        """
        self._write({"event": "phase", "from": self._phase.value, "phase": Phase.ENDED.value, "cause": cause}, now)

    def saw(self, event: Event, state: JobState, now: float) -> None:
        """Writes what changed something."""
        self._attempt = self._launch - 1 + state.attempt
        line = _described(event, state)
        if line:
            self._write(line, now)
        for loss in state.losses[self._losses :]:
            self._write({"event": "loss", "task": str(loss.task), "cause": cause_of(loss), **_followed(loss)}, now)
        self._losses = len(state.losses)
        trained = [resize for resize in state.resizes if resize.trained_at is not None]
        for resize in trained[self._trained :]:
            self._write(_scaled(resize, state), now)
        self._trained = len(trained)
        self._write_killed(state, now)
        if state.phase is not self._phase:
            cause = _cause(event, state)
            self._write({"event": "phase", "from": self._phase.value, "phase": state.phase.value, "cause": cause}, now)
            self._phase = state.phase

    def _write_killed(self, state: JobState, now: float) -> None:
        """Who has been killed because it stood still."""
        killed = {name for name, task in state.tasks.items() if task.stalled}
        for name in sorted(killed - self._killed, key=str):
            self._write({"event": "kill", "task": str(name), "cause": state.tasks[name].stalled}, now)
        self._killed = killed

    def _write(self, line: dict[str, Any], now: float) -> None:
        stamp = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "seconds": round(now, 3),
            "attempt": self._attempt,
        }
        # The stamp comes first for people to read, and last so that no record of a task can have one of its own.
        text = (os.linesep if self._cut else "") + to_json(stamp | line | stamp) + os.linesep
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
            self._cut = False
        except OSError as error:
            self._cut = True
            self.problem = self.problem or f"{self._path} is not complete: {error.strerror}"


def _is_cut(path: Path) -> bool:
    """Whether a launcher before this one has left a part of a line at the end of the file."""
    with suppress(OSError), path.open("rb") as file:  # one that cannot be read is told of when it is written
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read() not in (b"", b"\n")
    return False


def _described(event: Event, state: JobState) -> dict[str, Any]:
    match event:
        case Started(task, pid):
            return {"event": "started", "task": str(task), "pid": pid}
        case Exited(task, code):
            ended = state.tasks[task]
            return {
                "event": "exited",
                "task": str(task),
                "code": code,
                "status": ended.status.value,
                "cause": describe_end(ended),
            }
        case Recorded(task, record) if record["kind"] not in _FREQUENT:
            fields = {key: value for key, value in record.items() if key != "kind"}
            if record["kind"] in _OWN:
                return {"event": "record", "task": str(task), "record": fields | {"kind": record["kind"]}}
            return {**fields, "event": record["kind"], "task": str(task)}
    return _described_of_job(event)


def _described_of_job(event: Event) -> dict[str, Any]:
    """What concerns no task in particular."""
    match event:
        case Networked(private, text):
            return {"event": "network", "private": private, "text": text}
        case Signalled(signum):
            return {"event": "signal", "signal": signal_name(signum)}
        case Resized() | Answered():
            return _answer(event)
    return {}


def _answer(event: Resized | Answered) -> dict[str, Any]:
    """What has become of a request."""
    told = {"event": "scale", "request": event.request, "replicas": event.replicas}
    if isinstance(event, Resized):
        return told | {"answer": "accepted"}
    reason = {"reason": event.reason, "hint": event.hint} if event.reason else {}
    return told | {"answer": event.answer} | reason


def _scaled(resize: Resize, state: JobState) -> dict[str, Any]:
    """What came of other numbers of tasks: `took` seconds from the request to the first step that was told."""
    took = (resize.trained_at or 0.0) - resize.asked_at
    where = {"resumed": resize.resumed, "step": state.here, "took": round(took, 3)}
    return {"event": "scaled", "request": resize.wanted.request, "replicas": resize.wanted.replicas, **where}


def _followed(loss: Loss) -> dict[str, Any]:
    return {"step": loss.step, "restarts": "the task" if loss.alone else "the job", "delay": loss.delay}


def _cause(event: Event, state: JobState) -> str:
    match event:
        case Exited(task, _):
            return f"{task}: {describe_end(state.tasks[task])}"
        case Signalled(signum):
            return signal_name(signum)
        case Resized():
            return "other numbers of tasks were asked for"
    return "its time was over"
