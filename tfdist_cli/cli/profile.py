"""`tfdist profile`: profiles a running task."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.options import JsonOption, RunLocation, TaskOption, seconds_option
from tfdist_cli.errors import TfdistError, TimeoutExceeded, UsageError
from tfdist_cli.launch.run.history import Outcome, RunView, find_task
from tfdist_cli.launch.run.requests import Answers, ProfileRequest, new_id
from tfdist_cli.profiling.operations import Operation, operations
from tfdist_cli.profiling.xplane import read_planes
from tfdist_cli.protocol.profile_order import PROFILE_FOLDER
from tfdist_cli.protocol.run_files import number, read_bytes
from tfdist_cli.runs.source import RunSource, open_run
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.spec.task_id import TaskId

EXAMPLES = (
    "tfdist profile --task worker:1",
    "tfdist profile runs/digits-20260102-030405 --task chief --duration 5",
    "tfdist profile --task ps:0 --output /tmp/profile",
)
_MOST_ROWS = 10
_LONGEST = 60.0


def profile(
    run: RunLocation,
    *,
    task: TaskOption,
    duration: Annotated[float, typer.Option(min=0.1, max=_LONGEST, help="Seconds to record.")] = 2.0,
    output: Annotated[
        Path | None,
        typer.Option(help="A folder for the profile, in place of RUN/profile.", show_default=False),
    ] = None,
    timeout: Annotated[float, seconds_option("Seconds to wait for the profile beside --duration.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Record what a task of a running job does, and show the operations that take its time.

    The task records itself with TensorFlow's profiler while the training goes on, and stores the profile in the run
    directory. No port is opened. Every task that has joined its cluster can be profiled: chief, worker, ps, evaluator
    and the tasks of tf.data's service, also of a program that calls tfdist.scope() or tfdist.fit. It begins with the
    task's next heartbeat, within 2 s.

    The table lists the types of operations by the time that the task's threads spend in them. What an operation waits
    for in the background, such as a tensor of another task, is not part of it. tfdist tensorboard RUN shows the whole
    profile, if the package xprof is installed.

    A task of a run in a bucket, s3://bucket/run, is profiled from any machine: the launcher looks for requests there
    every 10 s.

    Exit codes: 0 the profile is stored; 1 the task or the run ended before, or the profile could not be recorded; 2 the
    request was rejected; 124 --timeout was exceeded.
    """
    with open_run(run) as source:
        view = source.view()
        name = find_task(view, task)
        if view.outcome is not Outcome.RUNNING:
            raise UsageError(
                f"{view.path.name} is not running: it is {view.outcome.value}",
                code="run-not-running",
                hint="a profile shows what a task does: launch the run again, and profile it while it trains",
            )
        path, answer = _take(source, view, name, duration, timeout)
        source.refresh([str(path.relative_to(view.path))])
        found = _operations(path)
        place: Location = path if source.url is None else source.url / str(path.relative_to(view.path))
        if output is not None:
            place = _move(path, view.path / PROFILE_FOLDER, output)
    if as_json:
        figures = {key: answer.get(key) for key in ("recorded", "took", "bytes")}
        fields = {"task": str(name), "path": str(place), **figures, "operations": [asdict(each) for each in found]}
        console.write(json.dumps(fields, indent=2))
        return
    _print_operations(found)
    console.write(f"{name}: {number(answer.get('recorded')) or 0:.1f} s in {place}")


def _take(
    source: RunSource, view: RunView, task: TaskId, seconds: float, timeout: float
) -> tuple[Path, Mapping[str, Any]]:
    """Has a task profiled.

    Returns:
        The path of the profile, and what the task reported.

    Raises:
        UsageError: the launcher has rejected the request.
        TfdistError: there is no profile.
    """
    contact = source.contact(view)
    request = ProfileRequest(new_id(), str(task), seconds)
    answers = Answers(contact, view, request.request, "profiled", time.monotonic() + seconds + timeout)
    with contact.post(request):
        answer = answers.first("profile")
    if answer is None:
        raise _timeout("the launcher has not answered in time", view)
    if answer.get("answer") != "accepted":
        raise UsageError(str(answer["reason"]), code=str(answer["code"]), hint=str(answer["hint"]) or None)
    console.write_message(f"profiling {task} for {seconds:g} s")
    ended = answers.next("profiled", "profile_failed", task=str(task))
    if ended is None:
        raise _timeout(f"{task} has not stored its profile in time", view)
    if ended["event"] == "exited":
        raise TfdistError(
            f"{task} exited before its profile was stored: {ended.get('cause')}",
            code="task-exited",
            hint=f"tfdist status {view.shown} shows whether it is started again",
        )
    if ended["event"] == "profile_failed":
        raise TfdistError(
            f"{task}: {ended.get('reason')}", code=str(ended.get("code")), hint=str(ended.get("hint")) or None
        )
    return view.path / str(answer["path"]), ended


def _timeout(message: str, view: RunView) -> TimeoutExceeded:
    return TimeoutExceeded(message, code="profile-timeout", hint=f"tfdist status {view.shown} shows its state")


def _move(path: Path, profiles: Path, output: Path) -> Path:
    """Moves a profile to another folder, where TensorBoard finds it, too; returns its path.

    Raises:
        UsageError: it cannot be moved there.
    """
    target = output / path.relative_to(profiles)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    except OSError as error:
        raise UsageError(
            f"the profile cannot be moved to {output}: {error.strerror}",
            code="output-not-writable",
            hint=f"it is in {path}",
        ) from error
    return target


def _operations(path: Path) -> list[Operation]:
    """Returns the operations in a profile.

    Raises:
        TfdistError: it cannot be read.
    """
    try:
        return operations(read_planes(read_bytes(path)))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TfdistError(
            f"the profile {path} cannot be read: {reason}",
            code="unreadable-profile",
            hint="record it again; a shorter one is smaller",
        ) from error


def _print_operations(found: Sequence[Operation]) -> None:
    """Prints the operations with the most time."""
    from rich.table import Table  # noqa: PLC0415 it takes 50 ms
    from rich.text import Text  # noqa: PLC0415 as above

    if not found:
        console.write("the task executed no operation meanwhile")
        return
    total = sum(each.seconds for each in found) or 1.0
    table = Table(box=None, pad_edge=False)
    for title in ("operation", "device"):
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    for title in ("ms", "share", "times"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in found[:_MOST_ROWS]:
        figures = (f"{each.seconds * 1000:.1f}", f"{each.seconds / total:.0%}", str(each.count))
        table.add_row(Text(neutral(each.name)), Text(neutral(each.device)), *figures)
    console.out.print(table)
    if len(found) > _MOST_ROWS:
        rest = found[_MOST_ROWS:]
        console.write(f"and {len(rest)} others, {sum(each.seconds for each in rest) * 1000:.1f} ms")
