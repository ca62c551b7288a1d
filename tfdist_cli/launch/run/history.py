"""The state of runs, read from their directories alone: during a run, after it, and after a crash."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import (
    EVENTS_FILE,
    LATEST,
    LEASE_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    PLAN_FILE,
    RESULT_FILE,
    has_checkpoints,
)
from tfdist_cli.launch.run.snapshot import numbers
from tfdist_cli.launch.usage import RESOURCES_FILE, TaskUsage
from tfdist_cli.protocol import task_events
from tfdist_cli.protocol.records import TASK_DIR, TASK_FILE
from tfdist_cli.protocol.run_files import number, read_bytes, read_lines, read_object, timestamp, whole
from tfdist_cli.spec.strategies import STRATEGIES, decides
from tfdist_cli.spec.task_id import TaskId

METRICS_FILE = "metrics.jsonl"
RESOURCES = ("gpus", "gpu_memory", "intra_op_threads", "inter_op_threads", "cpus", "memory", "cores")
"""The keys of a task's share in the plan."""
LEASE_SECONDS = 60.0
"""Seconds after its last sign of life until a launcher on another machine counts as dead."""
_PIDS = 2**31
"""Larger than any process id."""


class Outcome(Enum):
    """The state of a run."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """Its launcher was stopped by a signal."""
    LOST = "lost"
    """Its launcher exited without writing a result."""


@dataclass
class TaskView:
    """One task, according to the run's events.

    Args:
        task: the task.
        state: the state that it last reported, or its status after its exit.
        pid: its process; None after its exit.
        host: the machine of a task that was started by itself; empty for a launcher's tasks.
        cause: how it exited, in words.
        starts: how often it was started since the run's last launch.
        resources: its resources: `gpus`, `gpu_memory`, `intra_op_threads`, `memory`, … as the plan has them.
        usage: what it uses; None if its run has ended, or if it has not reported it.
    """

    task: TaskId
    state: str = "not started"
    pid: int | None = None
    host: str = ""
    cause: str = ""
    starts: int = 0
    resources: Mapping[str, Any] = field(default_factory=dict)
    usage: TaskUsage | None = None


@dataclass(frozen=True)
class RunView:
    """One run.

    Args:
        path: its directory.
        name: the cluster's name.
        strategy: its strategy.
        outcome: its state.
        launcher: the launcher's process; None if it has exited.
        began: when its last launch began; None if nothing was started.
        seconds: the duration of that launch: until now, or until its last event.
        phase: the last phase of the launch.
        tasks: its tasks.
        step: the last step in the metrics; None before the first.
        metrics: the training's metrics at that step.
        result: `result.json` of this launch; empty if there is none.
        url: the run's address in a storage service, to which it is uploaded; None if it is only here.
        scaled: for each accepted `tfdist scale` in this launch: `replicas` {role: [before, after]}, `seconds`: when,
            `live`: whether the others continued meanwhile, `took`: seconds until the training had the new size,
            `resumed`: the step from which it resumed if all tasks started anew, and the lists `joined`, `left`,
            `failed` (to join) and `lost` (while they should leave or save) of tasks. `reverted`: the failure because
            of which the tasks of before went on. `resumed`, `took` and `reverted` may be null.
        manual: whether its tasks were started each by itself, without a launcher.
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
    url: str | None = None
    manual: bool = False

    @property
    def shown(self) -> str:
        """The address or the path by which other commands find the run."""
        return self.url or str(self.path)

    @property
    def headline(self) -> str:
        """What ended the run; empty if its training was done."""
        return str(self.result.get("headline") or "")

    @property
    def can_resume(self) -> bool:
        """Whether another launch would resume the training from a checkpoint."""
        if self.outcome is Outcome.LOST or (self.manual and self.outcome in (Outcome.FAILED, Outcome.STOPPED)):
            return has_checkpoints(self.path)
        return self.outcome in (Outcome.FAILED, Outcome.STOPPED) and bool(self.result.get("checkpoints"))

    def as_json(self) -> dict[str, Any]:
        """The state in plain JSON types."""
        return {
            "run_dir": self.shown,
            "name": self.name,
            "strategy": self.strategy,
            "state": self.outcome.value,
            "phase": self.phase,
            "launcher": self.launcher,
            "manual": self.manual,
            "began": self.began.isoformat() if self.began else None,
            "seconds": self.seconds,
            "step": self.step,
            "metrics": dict(self.metrics),
            "scaled": list(self.scaled),
            "exit_code": self.result.get("exit_code"),
            "headline": self.headline or None,
            "tasks": [
                {"task": str(each.task), "state": each.state, "pid": each.pid, "cause": each.cause or None}
                | ({"host": each.host} if self.manual else {})
                | {"starts": each.starts, "usage": each.usage and each.usage.as_json(), **each.resources}
                for each in self.tasks
            ],
        }


def runs_in(parent: Path) -> Iterator[Path]:
    """The directories of runs in a folder, ordered by their last launch.

    Directories that this user may not read come first, since they may be runs.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        folders = list(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"there is no folder {parent}",
            code="no-such-file",
            hint="give the folder that contains runs, or launch a run first",
        ) from None
    except OSError as error:
        raise UsageError(f"the folder {parent} cannot be read: {error.strerror}", code="unreadable-file") from error
    found: dict[Path, float] = {}
    for each in folders:
        try:
            if not each.is_symlink() and (each / PLAN_FILE).exists():
                dated = next(file for file in (each / LOCK_FILE, each / PLAN_FILE) if file.exists())
                found[each] = dated.stat().st_mtime
        except PermissionError:
            found[each] = 0.0
        except OSError:  # it was removed, or its name is too long
            continue
    yield from sorted(found, key=lambda each: found[each])


def read_run(path: Path) -> RunView:
    """Reads a run's directory; damaged files are read as far as possible.

    Raises:
        UsageError: it is not a run's directory, or cannot be read.
    """
    try:
        return _read_run(path.absolute())
    except OSError as error:
        raise UsageError(
            f"{error.filename or path} cannot be read: {error.strerror}", code="unreadable-file"
        ) from error


def _read_run(path: Path) -> RunView:
    plan, names = _read_plan(path)
    tasks = {
        str(name): TaskView(name, resources=_resources(each)) for name, each in zip(names, plan["tasks"], strict=True)
    }
    path, launcher = path.resolve(), launcher_of(path)
    if is_manual(plan):
        return _read_manual(path, plan, tasks)
    events = list(_of_last_launch(path / EVENTS_FILE))
    for event in events:
        _add_joined(event, tasks, events[-1].get("attempt"))
        _apply(event, tasks)
    for task in tasks.values():
        with suppress(OSError, ValueError):  # the file is missing if the plan has all resources
            attempt = whole(events[-1].get("attempt")) if events else None
            task.resources = _resources(read_object(path / f"attempt_{attempt}" / task.task.slug / TASK_FILE))
    elsewhere = launcher is None and runs_elsewhere(path)
    if (launcher is not None or elsewhere) and events:
        _add_usage(path / RESOURCES_FILE, str(events[0]["time"]), tasks)
    phase = next((str(event.get("phase")) for event in reversed(events) if event.get("event") == "phase"), "running")
    ended = phase == "ended"
    last = _last_of_training(path / METRICS_FILE)
    result = _result(path / RESULT_FILE) if ended and launcher is None and not elsewhere else {}
    return RunView(
        path,
        str(plan.get("name", path.name)),
        str(plan.get("strategy", "")),
        Outcome.RUNNING if elsewhere else _outcome(launcher, ended, result),
        launcher,
        timestamp(events[0]["time"]) if events else None,
        _seconds(events, launcher),
        phase,
        list(tasks.values()),
        whole(last.get("step")),
        numbers(last.get("values")),
        result,
        _scaled(events),
        _url_of(path),
    )


def is_manual(plan: Mapping[str, Any]) -> bool:
    """Whether the tasks of a plan were started each by itself."""
    return plan.get("manual") is True


def read_events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the events of all launches of a run: those of launchers, then those of tasks that none has started.

    Raises:
        OSError: a file cannot be read.
    """
    yield from read_lines(path / EVENTS_FILE)
    yield from task_events.read_launch(path).events


def _read_manual(path: Path, plan: Mapping[str, Any], tasks: dict[str, TaskView]) -> RunView:
    """Reads a run whose tasks were started each by itself."""
    launch = task_events.read_launch(path)
    for event in launch.events:
        name = str(event.get("task"))
        if event["event"] == "started":
            own = tasks.setdefault(name, TaskView(TaskId.parse(name)))
            own.host, given = launch.hosts.get(name, ""), event.get("resources")
            own.resources = _resources(given if isinstance(given, dict) else {})
        _apply(event, tasks)
    for name in launch.lost:
        tasks[name].pid = None
        if tasks[name].state not in ("done", "left"):
            tasks[name].state, tasks[name].cause = "lost", "killed, or a program that does not record its exit"
    strategy = str(plan.get("strategy", ""))
    known = strategy in STRATEGIES
    deciding = [each for each in tasks.values() if known and decides(strategy, each.task.role)]  # type: ignore[arg-type]
    result = {} if launch.alive or not deciding else _manual_result(launch, deciding)
    last = _last_of_training(path / METRICS_FILE)
    began = timestamp(launch.events[0]["time"]) if launch.events else None
    ended = Outcome.LOST if result.get("exit_code") is None else _outcome(None, ended=True, result=result)
    return RunView(
        path,
        str(plan.get("name", path.name)),
        strategy,
        Outcome.RUNNING if launch.alive else ended,
        None,
        began,
        _manual_seconds(launch, began),
        "running" if launch.alive else "ended",
        list(tasks.values()),
        whole(last.get("step")),
        numbers(last.get("values")),
        result,
        manual=True,
    )


def _manual_result(launch: task_events.ManualLaunch, deciding: list[TaskView]) -> dict[str, Any]:
    """What a launcher would write into `result.json`, from what the tasks have recorded."""
    failed = next((each for each in deciding if each.state not in ("done", "left")), None)
    if failed is None:
        return {"exit_code": 0, **_recorded_result(launch, str(deciding[0].task))}
    name = str(failed.task)
    if failed.starts == 0:
        return {"exit_code": None, "headline": f"{name} was not started"}
    exit_code = whole(launch.last(name, "exited").get("code"))
    signum = exit_code - 128 if failed.state == "stopped" and exit_code else None
    code = launch.last(name, "error").get("code")
    return {
        "exit_code": exit_code,
        "headline": f"{name}: ended by {signal.Signals(signum).name}" if signum else f"{name}: {failed.cause}",
        "code": code,
        "signal": signal.Signals(signum).name if signum else None,
    }


def _recorded_result(launch: task_events.ManualLaunch, task: str) -> dict[str, Any]:
    found = launch.last(task, "result")
    result = {key: found[key] for key in ("step", "metrics", "examples") if key in found}
    return result | ({"training_seconds": found["seconds"]} if number(found.get("seconds")) is not None else {})


def _manual_seconds(launch: task_events.ManualLaunch, began: datetime | None) -> float:
    if began and launch.alive:
        return round((datetime.now(timezone.utc) - began).total_seconds(), 3)
    return float(launch.events[-1]["seconds"]) if launch.events else 0.0


def runs_elsewhere(path: Path) -> bool:
    """Whether this is the copy of a run whose launcher, on another machine, gave a sign of life a short while ago.

    The copy's time of modification says when, by the clock of this machine: the launcher's may be another.
    """
    if (path / LOCK_FILE).exists():
        return False
    with suppress(OSError, ValueError):
        lease = path / LEASE_FILE
        if read_object(lease).get("state") == "running":
            return time.time() - lease.stat().st_mtime < LEASE_SECONDS
    return False


def _url_of(path: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError):
        return str(read_object(path / ORIGIN_FILE)["url"])
    return None


def _resources(task: Mapping[str, Any]) -> dict[str, Any]:
    return {key: task.get(key) for key in RESOURCES}


def _read_plan(path: Path) -> tuple[dict[str, Any], list[TaskId]]:
    """The plan of a run, and its tasks.

    Raises:
        UsageError: it cannot be read, so the directory is not a run's.
    """
    try:
        plan = read_object(path / PLAN_FILE)
        tasks = [TaskId.parse(each["task"]) for each in plan["tasks"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f": {error.strerror}" if isinstance(error, OSError) else ""
        if isinstance(error, PermissionError):
            raise UsageError(
                f"the run {path} cannot be read: {PLAN_FILE}{reason}",
                code="unreadable-file",
                hint="give this user read permission",
            ) from error
        if path.name == LATEST and not path.is_symlink() and not path.exists():
            raise UsageError(
                f"there is no run in {path.parent} yet",
                code="not-a-run-dir",
                hint="start one with `tfdist launch CLUSTER`, or give the directory of a run",
            ) from error
        raise UsageError(
            f"{path} is not the directory of a run: its {PLAN_FILE} cannot be read{reason}",
            code="not-a-run-dir",
            hint="give a directory that `tfdist list` shows",
        ) from error
    return plan, tasks


def launcher_of(run: Path) -> int | None:
    """The process id of the launcher that has locked a run's directory; None if there is none on this machine."""
    lock = run.absolute() / LOCK_FILE
    with suppress(OSError, ValueError, OverflowError, RuntimeError, psutil.Error):  # RuntimeError: links in a circle
        process = psutil.Process(int(read_bytes(lock)))
        if any(Path(each.path) == lock.resolve() for each in process.open_files()):
            return process.pid
    return None


def leftover_processes(run: RunView) -> list[psutil.Process]:
    """Processes of a run that outlived its launcher."""
    found = []
    for pid in (each.pid for each in run.tasks if each.pid):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            # Another process may have got the id since.
            if Path(process.environ().get(TASK_DIR, "/")).resolve().is_relative_to(run.path.resolve()):
                found.append(process)
    return found


def signal_groups(processes: list[psutil.Process], signum: signal.Signals) -> None:
    """Signals the process groups of tasks."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)


def log_files(run: Path) -> dict[tuple[int, TaskId, str], Path]:
    """The logs of a run's tasks: (attempt, task, stream) → file, in that order."""
    found = {}
    for path in run.glob("attempt_*/*-*/*.log"):
        number = re.fullmatch(r"attempt_([0-9]+)", path.parts[-3])
        role, _, index = path.parts[-2].rpartition("-")
        with suppress(ValueError):
            if number:
                found[int(number[1]), TaskId.parse(f"{role}:{index}"), path.stem] = path
    return dict(sorted(found.items(), key=lambda item: (item[0][0], str(item[0][1]), item[0][2])))


def _seconds(events: list[dict[str, Any]], launcher: int | None) -> float:
    """The duration of the launch: until now while it runs, otherwise until its last event."""
    if not events:
        return 0.0
    last = float(events[-1]["seconds"])
    since = timestamp(events[-1]["time"])
    if launcher is None or since is None:
        return last
    return round(last + max(0.0, (datetime.now(timezone.utc) - since).total_seconds()), 3)


def _outcome(launcher: int | None, ended: bool, result: Mapping[str, Any]) -> Outcome:
    if launcher is not None:
        return Outcome.RUNNING
    code = result.get("exit_code")
    if not ended or code is None:
        return Outcome.LOST
    return Outcome.DONE if code == 0 else Outcome.STOPPED if result.get("signal") else Outcome.FAILED


def _of_last_launch(path: Path) -> list[dict[str, Any]]:
    """The events since the last launch began; their seconds count from there."""
    events: list[dict[str, Any]] = []
    for event in read_lines(path):
        if event.get("event") == "launch":
            events.clear()
        if number(event.get("seconds")) is not None and timestamp(event.get("time")):  # only the launcher writes both
            events.append(event)
    return events


def find_task(view: RunView, name: str) -> TaskId:
    """Returns a task of a run by its name.

    Raises:
        UsageError: the run has no such task.
    """
    try:
        task = TaskId.parse(name)
    except ValueError as error:
        raise UsageError(str(error), code="invalid-task") from None
    tasks = [each.task for each in view.tasks]
    if task not in tasks:
        known = ", ".join(map(str, tasks))
        raise UsageError(f"the run has no task {task}", code="unknown-task", hint=f"its tasks are {known}")
    return task


def _add_usage(path: Path, since: str, tasks: Mapping[str, TaskView]) -> None:
    """Adds what the tasks reported last, in this launch; a task that has exited uses nothing."""
    for line in read_lines(path, tail=True):
        usages = line.get("tasks")
        if isinstance(usages, dict) and str(line.get("time")) >= since:
            for name, task in tasks.items():
                if isinstance(usages.get(name), dict) and task.pid is not None:
                    task.usage = TaskUsage.read(usages[name])


def _add_joined(event: Mapping[str, Any], tasks: dict[str, TaskView], attempt: object) -> None:
    """Adds a task that is not in the plan: one started by hand, one that has left since, or one that must not leave.

    Args:
        event: the event.
        tasks: the tasks so far.
        attempt: the last attempt.
    """
    if event.get("event") == "started" and event.get("attempt") == attempt:
        with suppress(ValueError):
            tasks.setdefault(str(event.get("task")), TaskView(TaskId.parse(str(event.get("task")))))
    if event.get("event") == "exited" and event.get("status") == "left":
        with suppress(ValueError):
            tasks.setdefault(str(event.get("task")), TaskView(TaskId.parse(str(event.get("task"))), "left"))
        return
    name = str(event.get("worker"))
    if event.get("event") == "joined" and name not in tasks:
        with suppress(ValueError):  # a program's own record
            tasks[name] = TaskView(TaskId.parse(name), "joined")
    elif event.get("event") == "left" and name in tasks and not tasks[name].starts:
        tasks[name].state = "left"


def _apply(event: Mapping[str, Any], tasks: Mapping[str, TaskView]) -> None:
    """Updates the task that an event is about."""
    task = tasks.get(str(event.get("task")))
    if task is None:
        return
    match event.get("event"):
        case "started":
            pid = whole(event.get("pid"))
            task.state, task.cause, task.starts = "starting", "", task.starts + 1
            task.pid = pid if pid and 0 < pid < _PIDS else None
        case "state":
            task.state = str(event.get("state"))
        case "exited":
            task.state, task.pid, task.cause = str(event.get("status")), None, str(event.get("cause"))


def _scaled(events: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The accepted requests for other numbers of tasks, and their results."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        request = str(event.get("request"))
        after: dict[str, Any] = {key: number(event.get(key)) for key in ("resumed", "took")}
        after |= {key: _names(event.get(key)) for key in ("joined", "left", "failed", "lost")}
        after["reverted"] = str(event["reverted"]) if event.get("reverted") else None
        if event.get("event") == "scale" and event.get("answer") == "accepted" and (changes := _changes(event)):
            live = event.get("live") is True
            found[request] = {"replicas": changes, "seconds": event["seconds"], "live": live, **after}
        elif event.get("event") == "scaled" and request in found:
            found[request] |= after
    return tuple(found.values())


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _changes(event: Mapping[str, Any]) -> dict[str, list[int]]:
    """The numbers of tasks before and after; empty if the event is malformed."""
    replicas = event.get("replicas")
    changes = replicas.items() if isinstance(replicas, dict) else ()
    return {
        role: counts
        for role, counts in changes
        if isinstance(counts, list) and len(counts) == 2 and all(whole(each) is not None for each in counts)
    }


def _last_of_training(path: Path) -> Mapping[str, Any]:
    """The last line of the training's metrics."""
    lines = [line for line in read_lines(path, tail=True) if line.get("split") == "train"]
    return lines[-1] if lines else {}


def _result(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_object(path)
    return {}
