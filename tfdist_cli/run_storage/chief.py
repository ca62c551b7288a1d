"""A chief that no launcher has started: its run directory is uploaded while it trains, and brought back without it.

The task is a child process. This process holds the lease, writes what a launcher would write about the one task that it
knows, and ends when everything is uploaded: a container would otherwise end before.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from tfdist_cli.errors import ResultNotSaved
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.provenance import provenance
from tfdist_cli.launch.run.directory import EVENTS_FILE, PLAN_FILE, RESULT_FILE
from tfdist_cli.launch.run.report import signal_name
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.protocol.records import LAUNCHER_PID
from tfdist_cli.protocol.run_files import read_lines
from tfdist_cli.run_storage.stored_run import StoredRun
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.recipe import Recipe

_STOPS = (signal.SIGTERM, signal.SIGINT)


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
        UsageError: another chief or launch uses the run, or the service cannot be used.
        ResultNotSaved: the task is done, and its run directory could not be uploaded.
    """
    local = environment.run_dir or Path.cwd()
    stored = StoredRun.prepare(url, local, recipe)
    local.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = _Record(local, url, environment)
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


def _run(command: Sequence[str], record: _Record) -> int:
    """Runs the task, to which signals are passed on."""
    stopped: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _STOPS}
    try:
        environ = os.environ | {LAUNCHER_PID: str(os.getpid())}
        process = subprocess.Popen(command, env=environ, start_new_session=True)  # Ctrl-C is passed on once
        if stopped:
            process.send_signal(stopped[0])
        record.started(process.pid)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = 128 - code if code < 0 else code
    record.exited(code, stopped[0] if stopped and code else None)
    return code


class _Record:
    """What a launcher would write: the plan, the events and the result, of the chief alone.

    Args:
        local: the run directory.
        url: its address.
        environment: the task.
    """

    def __init__(self, local: Path, url: Url, environment: Environment) -> None:
        self._local = local
        self._task = str(environment.task)
        self._began = time.monotonic()
        plan = {"name": url.name, "strategy": environment.strategy, "tasks": [{"task": self._task}]}
        (local / PLAN_FILE).write_text(to_json(plan, indent=2) + "\n", encoding="utf-8")
        path = local / EVENTS_FILE
        self._attempt = 1 + sum(line.get("event") == "launch" for line in (read_lines(path) if path.exists() else ()))
        self._write("launch", provenance(Path.cwd()))

    def started(self, pid: int) -> None:
        """Writes that the task has started."""
        self._write("started", {"task": self._task, "pid": pid})

    def exited(self, code: int, stopped: int | None) -> None:
        """Writes how the task has exited.

        Args:
            code: its exit code.
            stopped: the signal that has stopped it; None if it has ended by itself.
        """
        name = None if stopped is None else signal_name(stopped)
        cause = f"ended by {name}" if name else f"exit code {code}" if code else ""
        status = "stopped" if name else "failed" if code else "done"
        result = {"exit_code": code, "headline": f"{self._task}: {cause}" if code else "", "signal": name}
        (self._local / RESULT_FILE).write_text(to_json(result, indent=2) + "\n", encoding="utf-8")
        self._write("exited", {"task": self._task, "status": status, "code": code, "cause": cause})
        self._write("phase", {"from": "running", "phase": "ended", "cause": cause})

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        when = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        line = {"time": when, "seconds": seconds, "attempt": self._attempt, "event": event, **fields}
        with (self._local / EVENTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
