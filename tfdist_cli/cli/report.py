"""`tfdist report`: writes an HTML report of runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import LATEST, RunLocations
from tfdist_cli.errors import UsageError
from tfdist_cli.report.data import read_data
from tfdist_cli.report.page import page
from tfdist_cli.runs.source import open_runs

EXAMPLES = (
    "tfdist report",
    "tfdist report runs/digits-20260102-030405 --output digits.html",
    "tfdist report runs/digits-* --output comparison.html",
)

_FILES = ("*.jsonl", "cluster.yaml", "recipe.yaml")


def report(
    runs: RunLocations = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file about a run, or about the differences of several runs.

    The file has the result, the training curves, the speed of each worker, staleness, a time line of what happened,
    and what each task used. It needs no network and no other file, and can be sent by mail. The command reads
    only the run directories: it works during a run, after it, and after a failure. What was not recorded is named.
    """
    with open_runs(runs or [str(LATEST)], _FILES) as sources:
        written = page([read_data(source.path) for source in sources], datetime.now().astimezone())
    try:
        output.write_text(written, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror}", code="report-not-written", hint="choose another --output"
        ) from error
    console.write(str(output))
