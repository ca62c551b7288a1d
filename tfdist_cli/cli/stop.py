"""`tfdist stop`: stops a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import RunLocation, seconds_option
from tfdist_cli.errors import ExitCode
from tfdist_cli.runs.source import open_run

EXAMPLES = ("tfdist stop", "tfdist stop runs/digits-20260102-030405 --now", "tfdist stop s3://bucket/runs/digits")


def stop(
    run: RunLocation,
    *,
    now: Annotated[bool, typer.Option("--now", help="Kill the tasks at once; no checkpoint is saved.")] = False,
    timeout: Annotated[float, seconds_option("Seconds to wait until the run has ended.")] = 120.0,
) -> None:
    """Stop a run: the training saves a checkpoint and exits.

    The default run is runs/latest, the last run launched. If the launcher was killed, the tasks that it left are
    stopped. A run in a bucket is stopped from any machine: its launcher looks for requests there every 10 s, and the
    command ends when everything is uploaded.

    Exit codes: 124 the run has not ended in time; 1 the launcher of a run in a bucket has disappeared.
    """
    with open_run(run) as source:
        view = source.view()
        if source.is_over(view):
            console.write(f"{view.path.name} is {view.outcome.value} already")
            return
        if not source.stop(view, now=now, timeout=timeout):
            console.write(f"{view.path.name} has not ended yet")
            raise typer.Exit(ExitCode.TIMEOUT)
    console.write(f"{view.path.name} has ended")
