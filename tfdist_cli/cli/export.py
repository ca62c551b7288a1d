"""`tfdist export`: the model of a run's checkpoint, for programs that have no tfdist."""

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

EXAMPLES = (
    "tfdist export runs/digits-20260102-030405",
    "tfdist export runs/latest --format keras --out model.keras --step 400",
)


class Format(str, Enum):
    """The formats of `tfdist_cli.export`."""

    saved_model = "saved_model"
    keras = "keras"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    format: Annotated[Format, typer.Option(help="A folder for TensorFlow, or a file for Keras.")] = Format.saved_model,  # noqa: A002 the option's name
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write; replaces an earlier export, and nothing else. RUN/export/FORMAT by default."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint's step; the newest whole one by default.")] = None,
) -> None:
    """Write the model of a checkpoint for programs that have no tfdist."""
    recipe_file = run / RECIPE_FILE
    if not recipe_file.is_file():
        raise UsageError(f"{run} holds no {RECIPE_FILE}", hint="name the directory of a run that trained a recipe")
    recipe = load_recipe(recipe_file)
    require_tensorflow()
    from tfdist_cli.task.export import export_checkpoint  # noqa: PLC0415 it imports TensorFlow

    console.write(str(export_checkpoint(recipe, run.absolute(), step, format.value, out)))
