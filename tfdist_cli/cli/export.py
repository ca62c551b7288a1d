"""`tfdist export`: exports the model of a checkpoint."""

from __future__ import annotations

import os
from enum import Enum
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.trained_run import opened_with_recipe
from tfdist_cli.errors import UsageError
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.export_formats import require_export_libraries
from tfdist_cli.spec.path_scheme import checked_location
from tfdist_cli.spec.sections.recipe import Export

EXAMPLES = (
    "tfdist export runs/digits-20260102-030405",
    "tfdist export runs/latest --format keras --out model.keras --step 400",
    "tfdist export runs/latest --out s3://bucket/models/digits/1",
    "tfdist export s3://bucket/runs/digits --out digits",
    "tfdist export runs/latest --versions --out /models/digits",
    "tfdist export runs/latest --format litert --quantize int8",
)


class Format(str, Enum):
    """The formats of an export: `EXPORT_FORMATS`."""

    saved_model = "saved_model"
    keras = "keras"
    onnx = "onnx"
    litert = "litert"
    openvino = "openvino"


class Quantize(str, Enum):
    """The types of quantized weights."""

    int8 = "int8"


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run directory, or its address: s3://bucket/runs/digits.", show_default=False
        ),
    ],
    format: Annotated[Format, typer.Option(help="The format of the file or folder.")] = Format.saved_model,  # noqa: A002 the option's name
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
    versions: Annotated[
        bool,
        typer.Option(
            "--versions",
            help="Write a SavedModel to a folder of the step, OUT/400, as TensorFlow Serving reads it. Default of OUT: "
            "RUN/export/serving.",
        ),
    ] = False,
    quantize: Annotated[
        Quantize | None, typer.Option(help="Store weights in this type. The outputs differ slightly.")
    ] = None,
) -> None:
    """Export the model of a checkpoint for programs without tfdist."""
    run_dir, recipe = opened_with_recipe(run)
    at = checked_location(out) if out else None
    if versions and format is not Format.saved_model:
        raise UsageError("--versions needs --format saved_model", code="export-has-no-versions")
    if quantize and format is Format.keras:
        raise UsageError("--quantize needs another format than keras", code="export-not-quantizable")
    named = recipe.export.signatures if recipe.export and format is Format.saved_model else None
    spec = Export(
        format=format.value, versions=versions, quantize=quantize.value if quantize else None, signatures=named
    )
    require_export_libraries(spec.formats)
    require_tensorflow()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdist_cli.task.export import export_checkpoint  # noqa: PLC0415 it imports TensorFlow

    console.write(str(export_checkpoint(recipe, run_dir, step, spec, at)))
