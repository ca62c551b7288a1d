"""`tfdist export`: exports the model of a checkpoint."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.errors import UsageError
from tfdist_cli.plan.plan import RECIPE_FILE
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.spec.path_scheme import checked_location

EXAMPLES = (
    "tfdist export runs/digits-20260102-030405",
    "tfdist export runs/latest --format keras --out model.keras --step 400",
    "tfdist export runs/latest --out s3://bucket/models/digits/1",
)


class Format(str, Enum):
    """The formats of an export."""

    saved_model = "saved_model"
    keras = "keras"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)],
    format: Annotated[Format, typer.Option(help="A SavedModel folder, or a .keras file.")] = Format.saved_model,  # noqa: A002 the option's name
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|URL",
            help="Output path, or an address such as s3://bucket/model. Only an earlier export is replaced. Default: "
            "RUN/export/FORMAT.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; by default the newest complete one.")
    ] = None,
) -> None:
    """Export the model of a checkpoint for programs without tfdist."""
    recipe_file = run / RECIPE_FILE
    if not recipe_file.is_file():
        raise UsageError(
            f"{run} has no {RECIPE_FILE}", code="no-recipe-in-run", hint="choose a run directory that trained a recipe"
        )
    at = checked_location(out) if out else None
    recipe = load_recipe(recipe_file)
    require_tensorflow()
    from tfdist_cli.task.export import export_checkpoint  # noqa: PLC0415 it imports TensorFlow

    console.write(str(export_checkpoint(recipe, run.absolute(), step, format.value, at)))
