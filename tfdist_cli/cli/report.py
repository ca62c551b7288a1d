"""`tfdist report`: writes an HTML report of runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import LATEST
from tfdist_cli.errors import UsageError
from tfdist_cli.report.data import read_data
from tfdist_cli.report.page import page

EXAMPLES = (
    "tfdist report",
    "tfdist report runs/digits-20260102-030405 --output digits.html",
    "tfdist report runs/digits-* --output comparison.html",
)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run directories; runs/latest by default.", show_default=False),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file about a run, or about the differences of several runs.

    The file has the result, the training curves, the speed of each worker, staleness, a time line of what happened,
    and what each task used. It needs no network and no other file, and can be sent by mail. The command reads
    only the run directories: it works during a run, after it, and after a failure. What was not recorded is named.
    """
    written = page([read_data(run) for run in runs or [LATEST]], datetime.now().astimezone())
    try:
        output.write_text(written, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror}", code="report-not-written", hint="choose another --output"
        ) from error
    console.write(str(output))
