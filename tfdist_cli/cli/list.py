"""`tfdist list`: the runs in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.console.progress import duration, metrics_text
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.documents import to_json
from tfdist_cli.launch.run.history import Outcome, RunView, read_run, runs_in

EXAMPLES = ("tfdist list", "tfdist list /mnt/runs --json")
OUTCOME_COLOURS = {
    Outcome.RUNNING: "cyan",
    Outcome.DONE: "green",
    Outcome.FAILED: "red",
    Outcome.STOPPED: "yellow",
    Outcome.LOST: "red",
}


def list(  # noqa: A001 the command's name
    parent: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder of runs.", show_default=False)] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
) -> None:
    """List the runs in a folder, the newest last: runs/ of the current folder by default."""
    paths = [*runs_in(parent)]
    found = [*_read(paths)]
    if as_json:
        console.write(to_json([news.as_json() for news in found], indent=2))
        return
    if not paths:
        console.err.print(f"there are no runs in {parent}", markup=False)
        return
    if not found:
        return
    rows = [_row(news) for news in found]
    widths = [max(cell.cell_len for cell in cells) for cells in zip(*rows, strict=True)]
    for row in rows:
        for cell, width in zip(row[:-1], widths, strict=False):
            cell.pad_right(width - cell.cell_len)
        line = Text("  ").join(row)
        if console.out.is_terminal:  # a run is one line of it; `status` has all of what ended it
            line.truncate(console.out.width, overflow="ellipsis")
        console.out.print(line, soft_wrap=True)


def _read(paths: Iterable[Path]) -> Iterator[RunView]:
    """What can be read of the runs; the others are named."""
    for path in paths:
        try:
            yield read_run(path)
        except UsageError as error:
            console.err.print(Text(f"left out: {neutral(error.message)}"), soft_wrap=True)


def _row(news: RunView) -> tuple[Text, ...]:
    step = f"step {news.step}" if news.step is not None else ""
    told = news.headline or metrics_text(news.metrics)
    return (
        Text(neutral(news.path.name)),
        Text(news.outcome.value, style=OUTCOME_COLOURS[news.outcome]),
        Text(f"{news.began.astimezone():%Y-%m-%d %H:%M}" if news.began else ""),
        Text(duration(news.seconds)),
        Text(step),
        Text(neutral(told)),
    )
