"""What has come of runs, read from their directories alone: during a run, after it, after a crash."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.chronicle import numbers
from tfdist_cli.launch.run_dir import CHECKPOINTS, EVENTS_FILE, LOCK_FILE, PLAN_FILE, RESULT_FILE
from tfdist_cli.records import TASK_DIR
from tfdist_cli.spec.task_id import TaskId

METRICS_FILE = "metrics.jsonl"
_TAIL = 256 * 1024
"""Bytes at the end of a file in which its last lines are looked for."""


class Outcome(Enum):
    """Where a run is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """It ended because its launcher was told to."""
    LOST = "lost"
    """Its launcher is gone, and has not said what came of it."""


@dataclass
class TaskView:
    """One task, as the run's events tell of it.

    Args:
        task: which task.
        state: what it last said it does, or how it ended.
        pid: its process; None when it has ended.
        cause: how it ended, in words.
        starts: how often it was started since the run's last launch.
    """

    task: TaskId
    state: str = "not started"
    pid: int | None = None
    cause: str = ""
    starts: int = 0


@dataclass(frozen=True)
class RunView:
    """One run.

    Args:
        path: its directory.
        name: the cluster's name.
        strategy: its strategy.
        outcome: where it is.
        launcher: the launcher's process; None when it is gone.
        began: when its last launch began; None when nothing was started.
        seconds: how long that launch has taken: until now, or else until the last that is known of it.
        phase: what the launch was about at last.
        tasks: its tasks.
        step: the last step that was told; None before the first.
        metrics: the training's metrics then.
        result: `result.json` of this launch; empty when there is none.
        scaled: for each time that `tfdist scale` was heeded in this launch, `replicas` {role: [before, after]},
            `seconds`: when, `resumed`: the step it went on from, and `took`: seconds until the first step after that;
            the last two are null until then.
    """

    path: Path
    name: str
    strategy: str
    outcome: Outcome
    launcher: int | None
    began: datetime | None
    seconds: float
    phase: str
    tasks: list[TaskView]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    scaled: tuple[Mapping[str, Any], ...] = ()

    @property
    def headline(self) -> str:
        """What ended it, if anything but the end of the training did."""
        return str(self.result.get("headline") or "")

    @property
    def can_go_on(self) -> bool:
        """Whether another launch would take up the training where this one has left it."""
        if self.outcome is Outcome.LOST:
            return any((self.path / CHECKPOINTS).glob("step-*"))
        return self.outcome in (Outcome.FAILED, Outcome.STOPPED) and bool(self.result.get("checkpoints"))

    def as_json(self) -> dict[str, Any]:
        """The news in plain JSON types."""
        return {
            "run_dir": str(self.path),
            "name": self.name,
            "strategy": self.strategy,
            "state": self.outcome.value,
            "phase": self.phase,
            "launcher": self.launcher,
            "began": self.began.isoformat() if self.began else None,
            "seconds": self.seconds,
            "step": self.step,
            "metrics": dict(self.metrics),
            "scaled": list(self.scaled),
            "exit_code": self.result.get("exit_code"),
            "headline": self.headline or None,
            "tasks": [
                {"task": str(each.task), "state": each.state, "pid": each.pid, "cause": each.cause or None}
                | {"starts": each.starts}
                for each in self.tasks
            ],
        }


def runs_in(parent: Path) -> Iterator[Path]:
    """The directories of runs in a folder, the one that was launched last at the end.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        folders = list(parent.iterdir())
    except OSError as error:
        raise UsageError(f"the folder {parent} cannot be read: {error.strerror}") from error
    found: dict[Path, float] = {}
    for each in folders:
        with suppress(OSError):  # not for this user to look into
            if not each.is_symlink() and (each / PLAN_FILE).is_file():
                dated = next(file for file in (each / LOCK_FILE, each / PLAN_FILE) if file.exists())
                found[each] = dated.stat().st_mtime
    yield from sorted(found, key=lambda each: found[each])


def read_run(path: Path) -> RunView:
    """Reads a run's directory.

    Raises:
        UsageError: it is none, or cannot be read.
    """
    try:
        return _read_run(path.absolute())
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def _read_run(path: Path) -> RunView:
    try:
        plan = json.loads((path / PLAN_FILE).read_text(encoding="utf-8"))
        tasks = {name: TaskView(TaskId.parse(name)) for name in (each["task"] for each in plan["tasks"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not the directory of a run: its {PLAN_FILE} cannot be read",
            hint="name a directory that `tfdist list` shows",
        ) from error
    path, launcher = path.resolve(), launcher_of(path)
    events = list(_of_last_launch(path / EVENTS_FILE))
    for event in events:
        _follow(event, tasks)
    phase = next((str(event["phase"]) for event in reversed(events) if event.get("event") == "phase"), "running")
    ended = phase == "ended"
    result = _read_json(path / RESULT_FILE) if ended and launcher is None else {}
    last = _last_of_training(path / METRICS_FILE)
    return RunView(
        path,
        str(plan.get("name", path.name)),
        str(plan.get("strategy", "")),
        _outcome(launcher, ended, result),
        launcher,
        datetime.fromisoformat(events[0]["time"]) if events else None,
        _seconds(events, launcher),
        phase,
        list(tasks.values()),
        last.get("step"),
        numbers(last.get("values")),
        result,
        _scaled(events),
    )


def launcher_of(run: Path) -> int | None:
    """The process that launches in a run's directory now; None when there is none on this machine."""
    lock = run.absolute() / LOCK_FILE
    with suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(lock.read_text(encoding="ascii")))
        if any(Path(each.path) == lock.resolve() for each in process.open_files()):
            return process.pid
    return None


def left_behind(news: RunView) -> list[psutil.Process]:
    """Processes of a run whose launcher is gone, which should have ended with it."""
    found = []
    for pid in (each.pid for each in news.tasks if each.pid):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            # Another process may have the number by now.
            if Path(process.environ().get(TASK_DIR, "/")).is_relative_to(news.path):
                found.append(process)
    return found


def end_groups(processes: list[psutil.Process], signum: signal.Signals) -> None:
    """Signals the process groups of tasks."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)


def log_files(run: Path) -> dict[tuple[int, TaskId, str], Path]:
    """The logs of a run's tasks: (attempt, task, stream) → file, in this order."""
    found = {}
    for path in run.glob("attempt_*/*-*/*.log"):
        number = re.fullmatch(r"attempt_([0-9]+)", path.parts[-3])
        role, _, index = path.parts[-2].rpartition("-")
        with suppress(ValueError):
            if number:
                found[int(number[1]), TaskId.parse(f"{role}:{index}"), path.stem] = path
    return dict(sorted(found.items(), key=lambda item: (item[0][0], str(item[0][1]), item[0][2])))


def _seconds(events: list[dict[str, Any]], launcher: int | None) -> float:
    """How long the launch has taken: until now while it goes on, and otherwise until the last that is known."""
    if not events:
        return 0.0
    last = float(events[-1]["seconds"])
    if launcher is None:
        return last
    since = datetime.now(timezone.utc) - datetime.fromisoformat(events[-1]["time"])
    return round(last + max(0.0, since.total_seconds()), 3)


def _outcome(launcher: int | None, ended: bool, result: Mapping[str, Any]) -> Outcome:
    if launcher is not None:
        return Outcome.RUNNING
    code = result.get("exit_code")
    if not ended or code is None:
        return Outcome.LOST
    return Outcome.DONE if code == 0 else Outcome.STOPPED if result.get("signal") else Outcome.FAILED


def _of_last_launch(path: Path) -> Iterator[dict[str, Any]]:
    """The events since the launcher last began, whose seconds count from then."""
    events: list[dict[str, Any]] = []
    for event in _lines(path):
        if event.get("event") == "launch":
            events.clear()
        if isinstance(event.get("seconds"), int | float) and isinstance(event.get("time"), str):  # a launcher wrote it
            events.append(event)
    yield from events


def _follow(event: Mapping[str, Any], tasks: Mapping[str, TaskView]) -> None:
    task = tasks.get(str(event.get("task")))
    if task is None:
        return
    match event.get("event"):
        case "started":
            task.state, task.pid, task.cause = "starting", int(event["pid"]), ""
            task.starts += 1
        case "state":
            task.state = str(event.get("state"))
        case "exited":
            task.state, task.pid, task.cause = str(event.get("status")), None, str(event.get("cause"))


def _scaled(events: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """What came of the requests for other numbers of tasks that were heeded."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        number = str(event.get("request"))
        if event.get("event") == "scale" and event.get("answer") == "accepted":
            found[number] = {key: event.get(key) for key in ("replicas", "seconds", "resumed", "took")}
        elif event.get("event") == "scaled" and number in found:
            found[number] |= {key: event.get(key) for key in ("resumed", "took")}
    return tuple(found.values())


def _last_of_training(path: Path) -> Mapping[str, Any]:
    """The last line of metrics of the training."""
    lines = [line for line in _lines(path, tail=True) if line.get("split") == "train"]
    return lines[-1] if lines else {}


def _lines(path: Path, *, tail: bool = False) -> Iterator[dict[str, Any]]:
    """The lines of a JSON Lines file that are whole: the last one may be being written."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if tail:
            file.seek(max(0, path.stat().st_size - _TAIL))
        for line in file:
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}
