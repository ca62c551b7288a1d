"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tfdist_cli.spec.launchers import launcher_names

LATEST = Path("runs/latest")

ClusterArgument = Annotated[
    Path,
    typer.Argument(metavar="CLUSTER", help="The cluster file: YAML with a strategy and roles.", show_default=False),
]
CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND", help="A program that every task runs instead of a recipe.", show_default=False
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="PATH|URL",
        help="The recipe file to train, also in a bucket: s3://bucket/recipe.yaml; overrides the cluster's 'recipe'.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="PATH=VALUE",
        help="Override a key of either file, such as roles.worker.replicas=4 or train.epochs=3. Repeatable.",
        show_default=False,
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="LAUNCHER",
        help=f"The launcher; overrides the cluster's 'launcher': {launcher_names()}.",
        show_default=False,
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(
        "--task", "-t", metavar="ROLE:INDEX", help="A task of the cluster, such as worker:1.", show_default=False
    ),
]
RunLocation = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]",
        help="The run directory, also in a bucket: s3://bucket/run; runs/latest by default.",
        default_factory=lambda: str(LATEST),
    ),
]
RunLocations = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run directories, also in a bucket: s3://bucket/run; runs/latest by default.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def seconds_option(text: str, *, show_default: bool = True) -> Any:
    """Returns an option for a number of seconds, at least 0.

    Args:
        text: its help.
        show_default: whether the help has its default value.
    """
    return typer.Option(parser=_seconds, metavar="SECONDS", help=text, show_default=show_default)


def _seconds(value: str | float) -> float:
    """Reads a number of seconds.

    Raises:
        BadParameter: it is no number, or negative.
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise typer.BadParameter(f"{value!r} is not a number")
    if number < 0:
        raise typer.BadParameter(f"{value} is less than 0")
    return number


def settings(overrides: list[str] | None, on: str | None) -> list[str]:
    """Returns the overrides of both options: `--on NAME` sets the cluster's `launcher`."""
    return [*(overrides or ()), *([] if on is None else [f"launcher={on}"])]
