"""Plots results with matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfdist_cli.bench.results import TITLES, Results, Row
from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.phases import PHASES

_BAR = 0.55
_STYLE = {
    "svg.hashsalt": "tfdist",  # equal results give equal files
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = dict(
    zip(
        (*PHASES, "rest"),
        ("#bab0ac", "#edc948", "#4e79a7", "#59a14f", "#f28e2b", "#e15759", "#b07aa1", "#dddddd"),
        strict=True,
    )
)


def require_matplotlib() -> None:
    """Checks that matplotlib is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib, which draws the plot, is not installed",
            code="matplotlib-missing",
            hint="pip install 'tfdist-cli[plot]'",
        )


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yields an empty figure, and saves it when the context exits.

    Args:
        path: the file; its suffix selects the format, such as .svg or .png.
        width: in inches.
        height: in inches.
    """
    import matplotlib as mpl  # noqa: PLC0415 it takes half a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        empty = Figure(figsize=(width, height), layout="constrained")
        yield empty
        dated = {"Date": None} if path.suffix == ".svg" else {}
        empty.savefig(path, dpi=150, metadata=dated)


def plot(results: Results, path: Path) -> None:
    """Plots the rates of all variants, and the phases of their steps."""
    split = [row for row in results.rows if row.split]
    with figure(path, 9 if split else 5, 1.8 + 0.35 * len(results.rows)) as whole:
        axes = whole.subplots(1, 2 if split else 1, squeeze=False)[0]
        whole.suptitle(results.title)
        _rates(axes[0], results)
        if split:
            _splits(axes[1], split)


def _rates(axes: Any, results: Results) -> None:
    spreads = [row.examples for row in results.rows]
    ends = [[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]]
    colours = ["#9c9c9c" if row.alone else "#4e79a7" for row in results.rows]
    names = [row.name for row in results.rows]
    axes.barh(names, [each.median for each in spreads], _BAR, xerr=ends, capsize=3, color=colours)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"examples per second, median and range of {len(results.rows[0].rates)}")


def _splits(axes: Any, rows: list[Row]) -> None:
    names = [row.name for row in rows]
    parts = [{**row.split.phases, "rest": max(row.split.rest, 0.0)} for row in rows if row.split]
    left = [0.0] * len(rows)
    for name, colour in COLOURS.items():
        widths = [each.get(name, 0.0) for each in parts]
        if any(widths):
            axes.barh(names, widths, _BAR, left=left, color=colour, label=TITLES.get(name, name))
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a worker's step")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
