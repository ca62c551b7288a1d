"""Runs whose tasks are started each by itself, with `tfdist role`: their records, their end, and how to stop them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.provenance import provenance
from tfdist_cli.launch.run.directory import PLAN_FILE
from tfdist_cli.launch.run.history import RunView, launcher_of
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, PlannedTask
from tfdist_cli.protocol import task_events
from tfdist_cli.protocol.records import TASK_EVENTS, append_event
from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.recipe_files import copy_to_run
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

_held: list[IO[bytes]] = []
"""The file of this process's task, which stays locked."""
_PERIOD = 0.1
"""Seconds between two checks of processes that are not children."""


def record_start(run: Path, own: PlannedTask, cluster: Cluster, recipe: Recipe | None) -> dict[str, str]:
    """Writes that this process becomes a task, for `tfdist status` and others.

    The first task of the cluster writes the plan and the files, too; another one only if there is no plan yet. Files
    that nothing of tfdist has written are kept. The training does not need any of this: what cannot be written is
    missing.

    Args:
        run: the run directory.
        own: the task.
        cluster: the cluster.
        recipe: the recipe; None for a program.

    Returns:
        Environment variables of the task.
    """
    path = task_events.path_of(run, own.task)
    with suppress(OSError):
        if launcher_of(run) is None and (own.task == cluster.tasks[0] or not (run / PLAN_FILE).exists()):
            _save(run, cluster, recipe)
        _held.append(task_events.hold(path))
        resources = own.resources.as_json()
        append_event(path, {"event": "started", "pid": os.getpid(), **provenance(recipe), "resources": resources})
        return {TASK_EVENTS: str(path)}
    return {}


def _save(run: Path, cluster: Cluster, recipe: Recipe | None) -> None:
    ours = {CLUSTER_FILE, RECIPE_FILE}
    if (run / PLAN_FILE).exists():
        with suppress(ValueError):
            ours &= set(read_object(run / PLAN_FILE).get("files", ours))
    else:
        ours = {name for name in ours if not (run / name).exists()}
    files = {CLUSTER_FILE: dump(cluster.model_copy(update={"recipe": Path(RECIPE_FILE) if recipe else None}))}
    if recipe:
        files[RECIPE_FILE] = dump(recipe)
        if recipe.source:
            copy_to_run(recipe.source.sha256, run)
    plan = {
        "name": cluster.name,
        "strategy": cluster.strategy,
        "run_dir": str(run),
        "manual": True,
        "files": sorted(ours),
        "tasks": [{"task": str(task)} for task in cluster.tasks],
    }
    for name, text in {
        **{name: text for name, text in files.items() if name in ours},
        PLAN_FILE: to_json(plan),
    }.items():
        new = run / f".{name}.{os.getpid()}"
        new.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        new.replace(run / name)


def stop_manual(view: RunView, *, now: bool, timeout: float) -> bool:
    """Stops the tasks of a run that were started on this machine: the others end with the one that decides.

    Args:
        view: the run.
        now: whether to kill them, without a checkpoint.
        timeout: seconds to wait for their end.

    Returns:
        Whether all tasks have ended.

    Raises:
        TfdistError: the deciding task runs on another machine.
    """
    found = [(each, process) for each in view.tasks if (process := _process(view.path, each))]
    alive = [each.task for each in view.tasks if each.pid]
    if not found and alive:
        raise TfdistError(
            f"no launcher runs, and {alive[0]} was started on another machine",
            code="no-launcher",
            hint=f"end {alive[0]} there, with Ctrl-C or SIGTERM: the other tasks end with it",
        )
    deciding = [process for each, process in found if each.task == view.tasks[0].task]
    for process in [each for _, each in found] if now else deciding or [each for _, each in found]:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL if now else signal.SIGTERM)
    return wait_for_manual(view.path, timeout)  # not for the processes: one may have exited without being reaped


def wait_for_manual(run: Path, timeout: float | None) -> bool:
    """Waits until no task of a run lives; returns whether that is so before `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while task_events.read_launch(run).alive:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_PERIOD)  # nothing tells that a lock of another process is released
    return True


def _process(run: Path, each: Any) -> psutil.Process | None:
    """The process of a task, if it is one of this machine."""
    with suppress(psutil.Error):
        process = psutil.Process(each.pid) if each.pid else None
        own = process.environ().get(TASK_EVENTS) if process else None
        if own and Path(own).resolve() == task_events.path_of(run, each.task).resolve():
            return process
    return None
