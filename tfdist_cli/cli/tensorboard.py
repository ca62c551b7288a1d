"""`tfdist tensorboard`: opens TensorBoard on the event files and profiles of runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tfdist_cli.cli.options import LATEST, RunLocations
from tfdist_cli.errors import ExitCode, UsageError
from tfdist_cli.launch.run.directory import short_names
from tfdist_cli.launch.run.history import RunView, read_run
from tfdist_cli.launch.tracking import TRACKING
from tfdist_cli.protocol.profile_order import PROFILE_SUFFIX
from tfdist_cli.requirements import require_trackers
from tfdist_cli.runs.source import RunSource, open_runs

EXAMPLES = (
    "tfdist tensorboard",
    "tfdist tensorboard runs/digits-20260102-030405 --port 6007",
    "tfdist tensorboard runs/digits-*",
)
_FILES = ("*tfevents*", f"*{PROFILE_SUFFIX}")
_TRACKER = "tensorboard"
_PERIOD = 30.0
"""Seconds between two downloads of a run in a storage service."""


def tensorboard(
    runs: RunLocations = None,
    *,
    host: Annotated[str, typer.Option(help="The address to listen on. TensorBoard has no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for a free one.")] = 6006,
) -> None:
    """Open TensorBoard on the event files and profiles of runs.

    These are the files of `tfdist launch --track tensorboard`, or `tracking: [tensorboard]` in the recipe, and those of
    Keras's TensorBoard callback in the run directory. Several runs are shown together. The page follows a run that
    trains. Ctrl-C ends it.

    Profiles of tfdist profile are shown if the package xprof, a plugin of TensorBoard, is installed (pip install
    xprof), and only of a single run.

    TensorBoard listens on this machine only: through ssh, open it with `ssh -L 6006:localhost:6006 HOST`.
    """
    require_trackers([_TRACKER])
    with open_runs(runs or [str(LATEST)], _FILES) as sources:
        views = [read_run(source.path) for source in sources]
        names = short_names([view.shown for view in views])
        folders = [pair for name, view in zip(names, views, strict=True) for pair in _event_folders(name, view)]
        if len(views) == 1 and len(folders) > 1:
            folders = [(views[0].path.name, views[0].path)]  # the plugin for profiles knows no list of folders
        argv = [sys.executable, "-m", "tensorboard.main", *_logdir(folders), "--host", host, "--port", str(port)]
        sys.stdout.flush()
        copies = [source for source in sources if source.url]
        if copies:
            raise typer.Exit(_show(argv, copies))
        os.execv(sys.executable, argv)  # noqa: S606 no shell: the arguments are as they are


def _show(argv: Sequence[str], copies: Sequence[RunSource]) -> int:
    """Runs TensorBoard, and downloads what has changed until it ends. Returns its exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    with subprocess.Popen(argv) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_PERIOD)
                for copy in copies:
                    copy.refresh()
        finally:
            process.terminate()


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """Handles SIGTERM: TensorBoard ends, too, and the copies are removed."""
    sys.exit(ExitCode.TERMINATED)


def _event_folders(name: str, view: RunView) -> Iterator[tuple[str, Path]]:
    """Yields a name and a folder for each folder of a run with event files or profiles.

    Args:
        name: the run's name.
        view: the run.

    Raises:
        UsageError: there is none.
    """
    run = view.path
    tracked = run / TRACKING / _TRACKER
    found = {_top(run, path) for pattern in _FILES for path in run.rglob(pattern)}
    if not found:
        raise UsageError(
            f"{view.shown} has no event files of TensorBoard, and no profile",
            code="no-event-files",
            hint="launch with --track tensorboard, set tracking: [tensorboard] in the recipe, or call tfdist profile",
        )
    for folder in [run] if run in found else sorted(found):
        yield name if folder in (run, tracked) else f"{name}/{folder.name}", folder


def _top(run: Path, path: Path) -> Path:
    """The tracker's folder, the first folder in the run's directory, or the run's directory for a file in it."""
    tracked = run / TRACKING / _TRACKER
    if tracked in path.parents:
        return tracked
    return run.joinpath(*path.relative_to(run).parts[:-1][:1])


def _logdir(folders: Sequence[tuple[str, Path]]) -> list[str]:
    """The option for one folder, or for several.

    Raises:
        UsageError: TensorBoard cannot take the path of one of several folders.
    """
    if len(folders) == 1:
        return ["--logdir", str(folders[0][1])]
    for _, path in folders:
        if "," in str(path):
            raise UsageError(
                f"TensorBoard shows several folders only if their paths have no comma: {path}",
                code="tensorboard-path",
                hint="open one run at a time, or rename the folder",
            )
    return ["--logdir_spec", ",".join(f"{re.sub('[:,]', '-', name)}:{path}" for name, path in folders)]
