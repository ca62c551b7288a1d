"""A chief that no launcher has started: its run directory is uploaded while it trains, and brought back without it.

The task is a child process. This process holds the lease, writes what a launcher would write about the one task that it
knows, and ends when everything is uploaded: a container would otherwise end before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from tfdist_cli.errors import ResultNotSaved, TfdistError, UsageError
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.provenance import provenance
from tfdist_cli.launch.run.directory import PLAN_FILE, RunDir, open_run_dir
from tfdist_cli.launch.run.event_log import EventLog
from tfdist_cli.launch.run.logs import ERROR_FILE
from tfdist_cli.launch.run.report import signal_name
from tfdist_cli.launch.run.requests import SIGNAL, ScaleRequest, take_requests
from tfdist_cli.plan.plan import RECIPE_FILE
from tfdist_cli.protocol.environment import UPLOADER, Environment
from tfdist_cli.protocol.records import LAUNCHER_PID, TASK_DIR, TASK_FILE
from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.run_storage.stored_run import StoredRun
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.recipe_files import copy_to_run
from tfdist_cli.spec.sections.recipe import Recipe

_STOPS = (signal.SIGTERM, signal.SIGINT)
_MAY_PASS = ("storage-unreachable", "run-dir-in-use")
"""Problems at the start that may be over when the task is started again."""


def uploads_here() -> bool:
    """Whether the parent of this process is `run_chief`, and uploads its run directory."""
    return os.environ.get(UPLOADER) == str(os.getppid())


def run_chief(url: Url, environment: Environment, recipe: Recipe | None, command: Sequence[str]) -> int:
    """Runs the chief, and uploads its run directory until everything is there.

    Args:
        url: the run's address.
        environment: the task, with its run directory on this machine.
        recipe: the recipe that it trains; None for a program.
        command: argv of the task.

    Returns:
        The task's exit code, as a shell shows it.

    Raises:
        UsageError: the address is not that of a run, or the local folder belongs to another run.
        TfdistError: another chief or launch uses the run, or the service cannot be used now.
        ResultNotSaved: the task is done, and its run directory could not be uploaded.
    """
    local = environment.run_dir or Path.cwd()
    stored = _prepare(url, local, recipe)
    with ExitStack() as stack:
        with stored.given_back_on_error():
            opened = stack.enter_context(open_run_dir(local, local.parent, local.name, datetime.now().astimezone()))
        record = _Record(opened, url, environment, recipe)
        with stored.uploading(local) as upload:
            code = _run(command, record)
            problem = upload.finish(code)
    if problem and not code:
        raise ResultNotSaved(
            f"the run is not complete in {url}: {problem}",
            code="run-not-uploaded",
            hint=f"it is in {local}: start the task again with the same --run-dir to upload it",
        )
    return code


def _prepare(url: Url, local: Path, recipe: Recipe | None) -> StoredRun:
    """Takes the lease, and downloads the run unless it is here.

    A scheduler does not start a task again that exits with 2. So a problem that may pass has another exit code.
    """
    try:
        return StoredRun.prepare(url, local, recipe)
    except UsageError as error:
        if error.code in _MAY_PASS:
            raise TfdistError(error.message, code=error.code, hint=error.hint) from error
        raise


def _run(command: Sequence[str], record: _Record) -> int:
    """Runs the task, to which signals are passed on."""
    stopped: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        if process is not None:
            process.send_signal(number)

    with _handlers(record, pass_on):
        own = {LAUNCHER_PID: str(os.getpid()), UPLOADER: str(os.getpid()), TASK_DIR: str(record.folder)}
        process = _started(command, own, record)
        if stopped:
            process.send_signal(stopped[0])
        record.started(process.pid)
        code = process.wait()
    code = 128 - code if code < 0 else code
    record.exited(code, stopped[0] if stopped and code else None)
    return code


def _started(command: Sequence[str], environment: Mapping[str, str], record: _Record) -> subprocess.Popen[bytes]:
    try:  # Ctrl-C is passed on once
        return subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
    except OSError as error:
        record.exited(127 if isinstance(error, FileNotFoundError) else 126, None)
        raise UsageError(
            f"cannot execute {command[0]!r}: {error.strerror}",
            code="program-not-executable",
            hint="pass a program that is on PATH after '--'",
        ) from error


@contextmanager
def _handlers(record: _Record, pass_on: Any) -> Iterator[None]:
    """Passes signals on to the task, and answers requests."""
    handlers = {**dict.fromkeys(_STOPS, pass_on), SIGNAL: lambda *_: record.refuse_requests()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Record:
    """What a launcher would write: the plan, the events and the result, of the chief alone.

    Args:
        opened: the run directory.
        url: its address.
        environment: the task.
        recipe: the recipe that it trains; None for a program.
    """

    def __init__(self, opened: RunDir, url: Url, environment: Environment, recipe: Recipe | None) -> None:
        self._opened = opened
        self._task = str(environment.task)
        self._began = time.monotonic()
        self.folder = opened.attempt_folder() / environment.task.slug
        """The folder of the task's error.json."""
        own = {"task": self._task}
        plan = {"name": url.name, "strategy": environment.strategy, "run_dir": str(opened.path), "tasks": [own]}
        files = {PLAN_FILE: to_json(plan, indent=2), str(self.folder / TASK_FILE): to_json(own)}
        if recipe:
            files[RECIPE_FILE] = dump(recipe)  # `tfdist export` and `tfdist predict` need it
        try:
            self.folder.mkdir(exist_ok=True)
            for name, text in files.items():
                (opened.path / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
            if recipe and recipe.source:
                copy_to_run(recipe.source.sha256, opened.path)
        except OSError as error:
            raise UsageError(
                f"the run directory cannot be used: {error.filename}: {error.strerror}",
                code="run-directory-unusable",
                hint="choose another folder with TFDIST_RUN_DIR",
            ) from error
        self._events = EventLog(opened.events, opened.attempt)
        self._events.begin(provenance(recipe))

    def started(self, pid: int) -> None:
        """Writes that the task has started."""
        self._write(event="started", task=self._task, pid=pid)

    def exited(self, code: int, stopped: int | None) -> None:
        """Writes how the task has exited.

        Args:
            code: its exit code.
            stopped: the signal that has stopped it; None if it has ended by itself.
        """
        error: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            error = read_object(self.folder / ERROR_FILE) if code else {}
        name = None if stopped is None else signal_name(stopped)
        cause = f"ended by {name}" if name else str(error.get("message") or f"exit code {code}") if code else ""
        status = "stopped" if name else "failed" if code else "done"
        headline = f"{self._task}: {cause}" if code else ""
        result = {"exit_code": code, "headline": headline, "signal": name, "code": error.get("code") or ""}
        with suppress(OSError):  # the disk may be full; the events have it, too
            self._opened.save_result(result)
        self._write(event="exited", task=self._task, status=status, code=code, cause=cause)
        self._write(event="phase", phase="ended", cause=cause, **{"from": "running"})

    def refuse_requests(self) -> None:
        """Answers requests, which only a launcher can fulfil."""
        for request in take_requests(self._opened.path):
            kind = "scale" if isinstance(request, ScaleRequest) else "profile"
            self._write(
                event=kind,
                request=request.request,
                answer="refused",
                reason=f"no launcher runs: {self._task} was started by itself",
                hint="start the run with `tfdist launch` for this",
                code="no-launcher",
            )

    def _write(self, **line: Any) -> None:
        self._events.write(line, time.monotonic() - self._began)
