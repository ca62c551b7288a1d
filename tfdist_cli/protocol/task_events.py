"""Events of tasks that no launcher has started: each task writes its own into the run directory that they share.

`manual/ROLE-INDEX.jsonl` has the lines that a launcher would write about this task into `events.jsonl`, without
`seconds`. The process of the task holds a lock on the file as long as it lives, on any machine that shares the
directory: a task that is killed writes nothing about its end.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, Any

from tfdist_cli.errors import ExitCode
from tfdist_cli.protocol.records import TASK_EVENTS, append_event, records_enabled
from tfdist_cli.protocol.run_files import read_lines, timestamp, whole
from tfdist_cli.spec.task_id import TaskId

FOLDER = "manual"
_PROVENANCE = ("python", "tfdist", "host", "commit", "modified")
_UNKNOWN_END = timedelta(seconds=120)
"""How long after its last line a task counts as having lived that was killed. Tasks wait so long for each other."""


def path_of(run: Path, task: TaskId) -> Path:
    """The file of a task."""
    return run / FOLDER / f"{task.slug}.jsonl"


def hold(path: Path) -> IO[bytes]:
    """Locks a task's file for this process, and for the program that replaces it.

    Returns:
        The file, which stays locked while it is open.

    Raises:
        OSError: the file cannot be created. A file system without locks is no error.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    os.set_inheritable(file.fileno(), True)
    return file


def is_held(path: Path) -> bool | None:
    """Whether the process of a task is alive; None if the file system does not tell."""
    try:
        with open(path, "r+b") as file:  # noqa: PTH123 a lock over NFS needs a file that is open for writing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def exited(code: int) -> None:
    """Writes how this task exits, if no launcher does."""
    path = os.environ.get(TASK_EVENTS)
    if path and not records_enabled():
        stopped = code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        status = "done" if code == ExitCode.DONE else "stopped" if stopped else "failed"
        append_event(path, {"event": "exited", "code": int(code), "status": status})


@dataclass
class _Life:
    """One process of a task.

    Args:
        task: the task.
        began: when it has started.
        lines: what it has written.
        alive: whether it lives; None if nothing tells.
    """

    task: str
    began: datetime
    lines: list[dict[str, Any]] = field(default_factory=list)
    alive: bool | None = False

    @property
    def has_exited(self) -> bool:
        """Whether it has written how it exits."""
        return bool(self.lines[-1]["event"] == "exited")

    @property
    def until(self) -> datetime:
        """The time up to which it has lived, as far as known."""
        if self.has_exited:
            return _time(self.lines[-1])
        return datetime.now(timezone.utc) if self.alive is not False else _time(self.lines[-1]) + _UNKNOWN_END


@dataclass(frozen=True)
class ManualLaunch:
    """The tasks that were started last, each by itself: those whose lives overlap.

    Args:
        events: what has happened, as lines of `events.jsonl`; the first one is a `launch`.
        alive: the tasks that live.
        lost: tasks that have ended without a line about it.
        hosts: where each task ran last.
    """

    events: tuple[Mapping[str, Any], ...] = ()
    alive: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    hosts: Mapping[str, str] = field(default_factory=dict)

    def last(self, task: str, *kinds: str) -> Mapping[str, Any]:
        """The last event of a task that is of one of some kinds; empty if there is none."""
        found = (line for line in reversed(self.events) if line.get("task") == task and line["event"] in kinds)
        return next(found, {})


def read_launch(run: Path) -> ManualLaunch:
    """Reads what the tasks of a run have written.

    Raises:
        OSError: a file cannot be read.
    """
    lives = sorted(_lives(run), key=lambda life: life.began)
    last: list[_Life] = []
    until = datetime.min.replace(tzinfo=timezone.utc)
    for life in lives:
        if life.began > until:
            last.clear()
        last.append(life)
        until = max(until, life.until)
    if not last:
        return ManualLaunch()
    lines = sorted((line for life in last for line in life.lines), key=_time)
    newest = {life.task: life for life in last}
    alive = frozenset(name for name, life in newest.items() if life.alive is not False and not life.has_exited)
    lost = frozenset(name for name, life in newest.items() if name not in alive and not life.has_exited)
    hosts = {name: str(life.lines[0].get("host") or "") for name, life in newest.items()}
    return ManualLaunch(tuple(_as_launch(lines)), alive, lost, hosts)


def _lives(run: Path) -> Iterator[_Life]:
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        role, _, index = path.stem.rpartition("-")
        with suppress(ValueError):
            yield from _lives_of(str(TaskId.parse(f"{role}:{index}")), path)


def _lives_of(task: str, path: Path) -> list[_Life]:
    found: list[_Life] = []
    for line in read_lines(path):
        if timestamp(line.get("time")) is None or not isinstance(line.get("event"), str):
            continue
        if line["event"] == "started":
            found.append(_Life(task, _time(line)))
        if found:
            found[-1].lines.append({**line, "task": task})
    if found:
        found[-1].alive = is_held(path)
    return found


def _as_launch(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the lines with their seconds since the first task has started."""
    began, error = None, dict[str, Any]()
    for line in lines:
        if began is None:
            began = _time(line)
            facts: dict[str, Any] = {
                key: line.get(key) for key in ("python", "tfdist", "host", "commit", "modified") if key in line
            }
            yield {"time": line["time"], "seconds": 0.0, "attempt": 1, "event": "launch", **facts}
        if line["event"] == "error":
            error[line["task"]] = line.get("message")
        if line["event"] == "exited":
            code = whole(line.get("code"))
            line["cause"] = str(error.get(line["task"]) or f"exit code {code}") if code else ""
        yield {"attempt": 1, **line, "seconds": round((_time(line) - began).total_seconds(), 3)}


def _time(line: Mapping[str, Any]) -> datetime:
    return timestamp(line["time"]) or datetime.now(timezone.utc)
