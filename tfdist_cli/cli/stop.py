"""`tfdist stop`: stops a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import RunArgument
from tfdist_cli.errors import ExitCode
from tfdist_cli.launch.run.history import read_run
from tfdist_cli.launch.stopping import is_over, stop_run

EXAMPLES = ("tfdist stop", "tfdist stop runs/digits-20260102-030405 --now")


def stop(
    run: RunArgument,
    *,
    now: Annotated[bool, typer.Option("--now", help="Kill the tasks at once; no checkpoint is saved.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until the run has ended.")] = 120.0,
) -> None:
    """Stop a run: the training saves a checkpoint and exits.

    The default run is runs/latest, the last run launched. If the launcher was killed, the tasks that it left are
    stopped. Exit code 124 if the run has not ended in time.
    """
    view = read_run(run)
    if is_over(view):
        console.write(f"{view.path.name} is {view.outcome.value} already")
        return
    if not stop_run(view, now=now, timeout=timeout):
        console.write(f"{view.path.name} has not ended yet")
        raise typer.Exit(ExitCode.TIMEOUT)
    console.write(f"{view.path.name} has ended")
