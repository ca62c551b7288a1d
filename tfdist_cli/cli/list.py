"""`tfdist list`: lists the runs in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.console.progress import duration, metrics_text
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.run.history import Outcome, RunView, read_run, runs_in
from tfdist_cli.runs.source import open_run, runs_at
from tfdist_cli.spec.path_scheme import Url, checked_location

EXAMPLES = ("tfdist list", "tfdist list /mnt/runs --json", "tfdist list s3://bucket/runs")
OUTCOME_COLOURS = {
    Outcome.RUNNING: "cyan",
    Outcome.DONE: "green",
    Outcome.FAILED: "red",
    Outcome.STOPPED: "yellow",
    Outcome.LOST: "red",
}


def list(  # noqa: A001 the command's name
    parent: Annotated[
        str,
        typer.Argument(
            metavar="[FOLDER]", help="The folder that holds the runs, also s3://bucket/runs.", show_default=False
        ),
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the runs in a folder, newest last. The default folder is runs/."""
    at = checked_location(parent)
    paths = runs_at(at) if isinstance(at, Url) else [str(path) for path in runs_in(at)]
    found = [*_read(paths)]
    if isinstance(at, Url):
        found.sort(key=lambda run: run.began.timestamp() if run.began else 0.0)
    if as_json:
        console.write(to_json([run.as_json() for run in found], indent=2))
        return
    if not paths:
        console.err.print(f"no runs in {parent}", markup=False)
        return
    if not found:
        return
    rows = [_row(run) for run in found]
    widths = [max(cell.cell_len for cell in cells) for cells in zip(*rows, strict=True)]
    for row in rows:
        for cell, width in zip(row[:-1], widths, strict=False):
            cell.pad_right(width - cell.cell_len)
        line = Text("  ").join(row)
        if console.out.is_terminal:  # one line per run; `status` shows the whole reason
            line.truncate(console.out.width, overflow="ellipsis")
        console.out.print(line, soft_wrap=True)


def _read(paths: Iterable[str]) -> Iterator[RunView]:
    """Yields the readable runs; reports the others on stderr."""
    for path in paths:
        try:
            with open_run(path) as source:
                yield read_run(source.path)
        except UsageError as error:
            console.err.print(Text(f"skipped: {neutral(error.message)}"), soft_wrap=True)


def _row(run: RunView) -> tuple[Text, ...]:
    step = f"step {run.step}" if run.step is not None else ""
    summary = run.headline or metrics_text(run.metrics)
    return (
        Text(neutral(run.path.name)),
        Text(run.outcome.value, style=OUTCOME_COLOURS[run.outcome]),
        Text(f"{run.began.astimezone():%Y-%m-%d %H:%M}" if run.began else ""),
        Text(duration(run.seconds)),
        Text(step),
        Text(neutral(summary)),
    )
