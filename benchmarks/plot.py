"""A plot of the contests' ratios."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.contests import Outcome
from benchmarks.figures import Comparison
from benchmarks.grid import Contest
from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.plot import figure

_TITLE_WIDTH = 52


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plots each contest's paired ratios."""
    plot_ratios({title(each.contest): Comparison(each.ours, each.peer).paired for each in outcomes}, path)


def title(contest: Contest) -> str:
    """Returns the title of a contest's bar."""
    wire = contest.ours.work.wire
    return f"{contest.title}{'' if wire == 'float32' else f', {wire}'}, against {contest.peer.name}"


def plot_ratios(ratios: Mapping[str, Spread], path: Path) -> None:
    """Plots ratios by title: the median, the minimum and the maximum."""
    names = [textwrap.fill(title.replace("`", ""), _TITLE_WIDTH) for title in ratios]
    medians = [spread.median for spread in ratios.values()]
    ends = [
        [spread.median - spread.low for spread in ratios.values()],
        [spread.high - spread.median for spread in ratios.values()],
    ]
    with figure(path, 9, 1 + 0.55 * len(names)) as whole:
        axes = whole.subplots()
        colours = ["#4e79a7" if median >= 1 else "#9c9c9c" for median in medians]
        axes.barh(names, medians, 0.55, xerr=ends, capsize=3, color=colours)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("tfdist's throughput as a multiple of its peer's, median and range of the rounds")
