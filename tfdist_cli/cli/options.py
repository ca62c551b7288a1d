"""The parameters that several commands share, described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.spec.launchers import launcher_names

LATEST = Path("runs/latest")

ClusterArgument = Annotated[
    Path,
    typer.Argument(metavar="CLUSTER", help="The cluster: a YAML file with a strategy and roles.", show_default=False),
]
CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND", help="Your own program, run by every task instead of a recipe.", show_default=False
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option("--recipe", "-r", help="The recipe to train, in place of the cluster's own.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="PATH=VALUE",
        help="Set one key of either file, such as roles.worker.replicas=4 or train.epochs=3. Can be repeated.",
        show_default=False,
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="LAUNCHER",
        help=f"What starts the tasks, in place of the cluster's own: {launcher_names()}.",
        show_default=False,
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(
        "--task", "-t", metavar="ROLE:INDEX", help="One task of the cluster, such as worker:1.", show_default=False
    ),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="[RUN]", help="The run's directory; runs/latest by default.", default_factory=lambda: LATEST
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")]


def settings(overrides: list[str] | None, on: str | None) -> list[str]:
    """What the options set in the files: `--on` is the cluster's `launcher`."""
    return [*(overrides or ()), *([] if on is None else [f"launcher={on}"])]
