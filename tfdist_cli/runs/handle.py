"""Launches runs from Python, and handles to runs: `tfdist.launch` and `tfdist.Run`.

The launcher is a process of its own, as with `tfdist launch`: the calling program needs no TensorFlow, keeps its signal
handlers and its event loop, and may end or be interrupted while the training goes on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Literal

from tfdist_cli.errors import RunFailed, TimeoutExceeded, UsageError
from tfdist_cli.launch.run.directory import EVENTS_FILE, chosen_location, new_run_dir, run_location
from tfdist_cli.launch.run.history import METRICS_FILE, Outcome, RunView, find_task, log_files, read_run
from tfdist_cli.launch.run.snapshot import numbers
from tfdist_cli.protocol.run_files import read_bytes, read_lines, timestamp
from tfdist_cli.run_storage.recipe import RecipeFetcher
from tfdist_cli.runs.source import open_run
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.trackers import TrackerName

_PERIOD = 0.05
"""Seconds between two looks at a launcher, whose start no portable event reports."""
_ERROR = re.compile(r"^error(?:\[([a-z0-9-]+)\])?: (.*)")
_HINT = re.compile(r"^hint: (.*)")


@dataclass(frozen=True)
class LauncherProcess:
    """A launcher that this process has started.

    Args:
        process: the process.
        messages: the file of what it prints.
    """

    process: subprocess.Popen[bytes]
    messages: IO[bytes]

    @property
    def error(self) -> RunFailed | None:
        """The error that it has printed; None if it has printed none."""
        self.messages.seek(0)
        return launcher_error(self.messages.read().decode(errors="replace"))


class Run:
    """A run: one that `tfdist.launch` has started, or any other one, by its directory or its address.

    With an address, such as `s3://bucket/runs/digits`, it works on any machine. The state is as it was uploaded last, a
    few seconds ago.

    As a context manager it stops the run when the block ends, if the run goes on then.

    Args:
        path: the run's directory, or its address in a storage service.
        launcher: its launcher, if this process has started it.

    Raises:
        UsageError: there is no run, or the service cannot be used.
    """

    def __init__(self, path: str | Path, launcher: LauncherProcess | None = None) -> None:
        self._files = ExitStack()  # closed with this object: a copy is removed then
        self._source = self._files.enter_context(open_run(path))
        self._view = read_run(self._source.path)
        self._launcher = launcher

    @property
    def path(self) -> Path:
        """The run's directory; for an address, a copy of a part of it on this machine."""
        return self._view.path

    @property
    def url(self) -> str | None:
        """The run's address in a storage service; None if it is only on this machine."""
        return self._view.url

    def __repr__(self) -> str:
        return f"<tfdist.Run {self._view.shown}>"

    def __enter__(self) -> Run:  # noqa: PYI034 typing has Self since Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        if not self._source.is_over(self.status()):
            self.stop()

    def status(self) -> RunView:
        """Returns the run's state: `outcome`, `step`, `metrics`, `tasks`, and more; `as_json()` has plain types.

        Raises:
            UsageError: its directory or its address cannot be read.
        """
        if self._launcher:
            self._launcher.process.poll()  # a launcher that has exited must not stay as a zombie
        return self._source.view()

    def wait(self, timeout: float | None = None) -> RunView:
        """Waits until the run has ended.

        Args:
            timeout: seconds to wait; None for no limit. The run goes on after a timeout.

        Returns:
            Its state, with `result`, the content of result.json.

        Raises:
            TimeoutExceeded: it goes on (`run-not-ended`).
            RunFailed: its training was not done; the code is that of its failure.
        """
        if not self._has_ended(timeout):
            raise TimeoutExceeded(
                f"{self.path.name} has not ended within {timeout:g} s",
                code="run-not-ended",
                hint="wait again, or call stop()",
            )
        view = self.status()
        if view.outcome is not Outcome.DONE:
            raise self._failure(view)
        return view

    def _has_ended(self, timeout: float | None) -> bool:
        """Waits until the run has ended; returns whether it has."""
        if self._launcher is None:
            return self._source.wait(self.status(), timeout)
        try:
            self._launcher.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl, as `pandas.DataFrame` takes them.

        Args:
            split: `train`, or the data of a validation; None for all.

        Returns:
            For each report a dictionary of the metrics, and of `time`, `split`, `step`, `epoch`, `epoch_done` and
            `steps_per_second`, which is None for a validation.

        Raises:
            UsageError: the file cannot be read.
        """
        self._source.refresh()
        try:
            lines = list(read_lines(self.path / METRICS_FILE))
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {error.strerror}", code="unreadable-file") from error
        keys = ("time", "split", "step", "epoch", "epoch_done", "steps_per_second")
        chosen = (line for line in lines if split is None or line.get("split") == split)
        return [{**numbers(line.get("values")), **{key: line.get(key) for key in keys}} for line in chosen]

    def logs(self, task: str, *, stream: Literal["stdout", "stderr"] | None = None, attempt: int | None = None) -> str:
        """Returns what a task has written.

        Args:
            task: `worker:1`.
            stream: one of its streams; None for standard output, then standard error.
            attempt: the number of the attempt, from 1; None for the last one.

        Raises:
            UsageError: the run has no such task, or a log cannot be read.
        """
        wanted = find_task(self.status(), task)
        self._source.refresh([f"attempt_*/{wanted.slug}/*.log"])
        found = {key: path for key, path in log_files(self.path).items() if key[1] == wanted}
        last = max((number for number, _, _ in found), default=0) if attempt is None else attempt
        names = ("stdout", "stderr") if stream is None else (stream,)
        paths = [found[last, wanted, name] for name in names if (last, wanted, name) in found]
        try:
            return "".join(read_bytes(path).decode(errors="replace") for path in paths)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {error.strerror}", code="unreadable-file") from error

    def stop(self, *, now: bool = False, timeout: float = 120.0) -> RunView:
        """Stops the run: the training saves a checkpoint and exits. Nothing happens if it has ended.

        Args:
            now: whether to kill its tasks at once, without a checkpoint.
            timeout: seconds to wait for its end.

        Returns:
            Its state after that.

        Raises:
            TimeoutExceeded: it has not ended in time (`run-not-ended`).
            TfdistError: its launcher, on another machine, has disappeared (`launcher-lost`).
        """
        view = self.status()
        if not self._source.is_over(view) and not self._source.stop(view, now=now, timeout=timeout):
            raise TimeoutExceeded(
                f"{self.path.name} has not ended within {timeout:g} s", code="run-not-ended", hint="call stop(now=True)"
            )
        return self.status()

    def _failure(self, view: RunView) -> RunFailed:
        told = self._launcher and self._launcher.error
        if view.headline:
            hint = told.hint if told and told.code == view.result.get("code") else f"see {view.shown}"
            return RunFailed(view.headline, code=str(view.result.get("code") or "run-failed"), hint=hint)
        if view.manual:
            name = view.tasks[0].task
            return RunFailed(
                f"{name} of {self.path.name} ended without a record: it was killed, or its program records none",
                code="task-lost",
                hint=f"see the output of {name}, where it was started",
            )
        return told or RunFailed(
            f"the launcher of {self.path.name} disappeared without a result",
            code="launcher-lost",
            hint="stop() ends the tasks that it has left; launch it again with run_dir= to resume",
        )


def launch(  # noqa: PLR0913 the arguments are the options of the command
    cluster: str | Path,
    *,
    recipe: str | Path | None = None,
    command: Sequence[str] | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 as the option of the command
    on: str | None = None,
    run_dir: str | Path | None = None,
    max_restarts: int | None = None,
    track: Sequence[TrackerName] = (),
) -> Run:
    """Starts a cluster and trains a recipe, or runs a program in each task, as `tfdist launch` does.

    It returns when the tasks are about to start. The run goes on when this program ends, until it is done or stopped.

    Args:
        cluster: the cluster file.
        recipe: the recipe file; by default the one that the cluster file names.
        command: argv of a program to run in place of a recipe.
        set: keys of either file to override, such as `{"train.epochs": 3}`.
        on: the launcher; by default the one of the cluster file.
        run_dir: the run directory, or its address in a storage service. An existing one continues that run; by default
            a new one below `runs/`.
        max_restarts: the maximum number of restarts.
        track: programs that keep the run's metrics, beside those of the recipe's `tracking`: `tensorboard`, `mlflow`,
            `wandb`, `csv`.

    Returns:
        The run.

    Raises:
        SpecError: a file is invalid.
        UsageError: there is nothing to run, or the run directory cannot be used.
        RunFailed: the launcher has exited before any task started; the code is that of its error.
    """
    overrides = [f"{path}={_as_yaml(value)}" for path, value in (set or {}).items()]
    overrides += [] if on is None else [f"launcher={on}"]
    spec, _ = load_run(Path(cluster), recipe, overrides, fetch=RecipeFetcher())
    at, path = run_location(chosen_location(run_dir), spec)
    own = at is None
    if at is None:
        at = path = new_run_dir(path, spec.name, datetime.now().astimezone())
    argv = [sys.executable, "-m", "tfdist_cli", "launch", str(cluster), "--quiet", "--run-dir", str(at)]
    argv += [] if recipe is None else ["--recipe", str(recipe)]
    argv += [] if max_restarts is None else ["--max-restarts", str(max_restarts)]
    argv += [argument for tracker in track for argument in ("--track", tracker)]
    argv += [argument for override in overrides for argument in ("--set", override)]
    argv += ["--", *command] if command else []
    try:
        return Run(path, start_launcher(argv, path))
    except BaseException:
        if own:
            with suppress(OSError):  # a launcher that has begun has left files
                path.rmdir()
        raise


def _as_yaml(value: Any) -> str:
    """Returns a value as JSON, which is YAML, too."""
    return json.dumps(value, default=str)


def _has_begun(path: Path, since: datetime) -> bool:
    """Whether a launch has begun in a run's directory."""
    with suppress(OSError):
        for line in read_lines(path / EVENTS_FILE, tail=True):
            when = timestamp(line.get("time"))
            if line.get("event") == "launch" and when and when.timestamp() >= since.timestamp() - 0.001:
                return True
    return False


def launcher_error(text: str) -> RunFailed | None:
    """The error in what a launcher has printed; None if there is none."""
    lines = text.splitlines()
    errors = [match for line in lines if (match := _ERROR.match(line))]
    hints = [match[1] for line in lines if (match := _HINT.match(line))]
    if not errors:
        return None
    message = "\n".join(match[2] for match in errors)
    return RunFailed(message, code=errors[0][1] or "run-failed", hint=next(iter(hints), None))


def start_launcher(argv: Sequence[str], path: Path) -> LauncherProcess:
    """Starts a launcher, and returns when its tasks are about to start.

    Args:
        argv: its command.
        path: the run's directory.

    Raises:
        RunFailed: it has exited before.
    """
    began = datetime.now(timezone.utc)
    messages = tempfile.TemporaryFile()  # noqa: SIM115 it is read when the run has ended
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=messages,
        start_new_session=True,  # an interrupted cell or a closed terminal does not end the training
    )
    launcher = LauncherProcess(process, messages)
    try:
        while not _has_begun(path, began) and process.poll() is None:
            time.sleep(_PERIOD)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if not _has_begun(path, began):
        raise launcher.error or RunFailed(
            f"the launcher exited with {process.returncode} before any task started", code="launcher-lost"
        )
    return launcher
