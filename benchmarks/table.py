"""Results as Markdown tables in docs/reference/benchmark-results.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.contests import Outcome
from benchmarks.figures import Comparison
from benchmarks.grid import GROUPS, PLACEMENTS, THREADS, Side
from benchmarks.sizes import SIZES
from tfdist_cli.bench.figures import Spread
from tfdist_cli.plan.task_environment import MALLOC

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"
PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "tf_keras", "torch")
"""Packages whose versions are printed."""
PEERS = {
    "tf_keras": "tf_keras",
    "torch": "DDP",
    "torch_fp16": "DDP, both float16",
    "keras": "one process of Keras's `fit`",
}
"""The columns of the grid, by the last part of a contest's name."""
PLOT_TEXT = "tfdist's throughput as a multiple of its peer's"


@dataclass(frozen=True)
class Circumstances:
    """How the results were measured.

    Args:
        command: the command line.
        day: the date of the report.
        machine: cores and versions.
    """

    command: str
    day: date
    machine: str


def render(
    outcomes: Sequence[Outcome], seconds: Mapping[str, Sequence[float]], about: Circumstances, plot: str | None = None
) -> str:
    """Returns the tables with their circumstances.

    Args:
        outcomes: throughput.
        seconds: wall times by name.
        about: how they were measured.
        plot: the path of the plot, relative to the page.
    """
    parts = [f"`{about.command}`, {about.day.isoformat()}. {about.machine}."]
    if outcomes:
        parts += [_grid(outcomes), _extremes(outcomes)]
        parts += [f"![{PLOT_TEXT}]({plot})"] if plot else []
        parts += [_throughput(outcomes), _circumstances(outcomes)]
    if seconds:
        parts.append(_wall_times(seconds))
    return "\n\n".join(part for part in parts if part) + "\n"


def write(path: Path, results: str) -> None:
    """Replaces the results between a page's markers.

    Raises:
        ValueError: the page has no markers.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no {BEGIN} … {END}")
    path.write_text(f"{before}{begin}\n{results}{end}{after}", encoding="utf-8")


def _grid(outcomes: Sequence[Outcome]) -> str:
    """Returns the paired ratios of the grid's contests: a row for each training of tfdist, a column for each peer."""
    rows: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        row, _, peer = outcome.contest.name.rpartition(":")
        if outcome.contest.name in GROUPS["grid"]:
            rows.setdefault(row, {})[peer] = f"{_ratio(outcome):.2f}"
    if not rows:
        return ""
    peers = [peer for peer in PEERS if any(peer in ratios for ratios in rows.values())]
    lines = [_row(["model", "placement", *(PEERS[peer] for peer in peers)]), f"|{'---|' * (2 + len(peers))}"]
    for row, ratios in rows.items():
        model, placement = row.split(":")
        lines.append(_row([SIZES[model].title, PLACEMENTS[placement].title, *(ratios.get(peer, "") for peer in peers)]))
    return "\n".join(["tfdist's steps per second as a multiple of the peer's:", "", *lines])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _circumstances(outcomes: Sequence[Outcome]) -> str:
    busiest = max(outcome.others for outcome in outcomes)
    days = sorted({day for outcome in outcomes for day in outcome.days})
    measured = f"Measured from {days[0]} to {days[-1]}. " if len(days) > 1 else ""
    return (
        "Steps per second: median (min to max) of the rounds. Paired ratios: their median (each round's). "
        f"Every task of a cluster, of all programs, has {THREADS}; all programs have `GLIBC_TUNABLES={MALLOC}`. "
        "Each worker beside a ps stays on its own core, as with tfdist's plan; so do tf_keras's, and those of PyTorch. "
        f"{measured}Other processes used up to {busiest:.0%} of the machine during a run."
    )


def _throughput(outcomes: Sequence[Outcome]) -> str:
    columns = ["contest", "model: placement", "tfdist, steps/s", "peer, steps/s", "ratio of medians", "paired ratios"]
    rows = [_row(columns), f"|{'---|' * len(columns)}"]
    for outcome in outcomes:
        contest, comparison = outcome.contest, Comparison(outcome.ours, outcome.peer)
        cells = [
            f"`{contest.name}`",
            contest.title,
            f"{_side(contest.ours)}: {Spread.of(outcome.ours).shown(1)}",
            f"{_side(contest.peer)}: {Spread.of(outcome.peer).shown(1)}",
            f"**{comparison.of_medians:.2f}**",
            f"{comparison.paired.median:.2f} ({', '.join(f'{ratio:.2f}' for ratio in comparison.ratios)})",
        ]
        rows.append(_row(cells))
    return "\n".join(rows)


def _side(side: Side) -> str:
    return f"{side.name} [{side.settings}]"


def _extremes(outcomes: Sequence[Outcome]) -> str:
    """Says which trainings of tfdist are worst and best, each compared with the best of its peers."""
    best_peers: list[Outcome] = []
    for outcome in outcomes:
        ours = outcome.contest.ours
        same = [each for each in outcomes if each.contest.ours == ours]
        if outcome is min(same, key=_ratio):
            best_peers.append(outcome)
    shown = {
        name: f"`{each.contest.name}`, **{_ratio(each):.2f}**"
        for name, each in (("Worst", min(best_peers, key=_ratio)), ("Best", max(best_peers, key=_ratio)))
    }
    count = len(best_peers)
    return (
        f"Of {count} training{'s' * (count != 1)} of tfdist, each against its best peer here: "
        f"worst {shown['Worst']}; best {shown['Best']}."
    )


def _ratio(outcome: Outcome) -> float:
    return Comparison(outcome.ours, outcome.peer).paired.median


def _wall_times(seconds: Mapping[str, Sequence[float]]) -> str:
    rows = ["| from start to end of | seconds, median (min to max) | times |", "|---|---|---|"]
    rows += [f"| {name} | {Spread.of(values).shown(2)} | {len(values)} |" for name, values in seconds.items()]
    return "\n".join(rows)
