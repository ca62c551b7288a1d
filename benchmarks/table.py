"""Results as Markdown, and their place in docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.contests import Outcome
from benchmarks.figures import Comparison, Spread

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"
_PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "tf_keras", "torch")


@dataclass(frozen=True)
class Circumstances:
    """What a table's reader has to know to repeat it.

    Args:
        command: what was run.
        day: when.
        rounds: runs of each contestant.
        machine: cores, versions.
    """

    command: str
    day: date
    rounds: int
    machine: str


def machine() -> str:
    """This machine without its name: cores, system, versions."""
    versions = [f"Python {platform.python_version()}", *filter(None, map(_installed, _PACKAGES))]
    return f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, {', '.join(versions)}"


def render(outcomes: Sequence[Outcome], seconds: Mapping[str, Sequence[float]], about: Circumstances) -> str:
    """The tables with their circumstances.

    Args:
        outcomes: throughput.
        seconds: wall times, by what was timed.
        about: how they were measured.
    """
    parts = [f"`{about.command}`, {about.day.isoformat()}. {about.machine}."]
    if outcomes:
        parts.append(_throughput(outcomes))
        busiest = max(outcome.others for outcome in outcomes)
        parts.append(
            f"Steps per second, median (min to max) of {about.rounds} rounds. "
            f"Other processes used up to {busiest:.0%} of the machine during a run."
        )
    if seconds:
        parts.append(_wall_times(seconds))
    return "\n\n".join(parts) + "\n"


def write(path: Path, results: str) -> None:
    """Puts results between a page's markers.

    Raises:
        ValueError: the page has no markers.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no {BEGIN} … {END}")
    path.write_text(f"{before}{begin}\n{results}{end}{after}", encoding="utf-8")


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _throughput(outcomes: Sequence[Outcome]) -> str:
    rows = ["| cluster | tfdist | peer | ratio of medians | median of paired ratios |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        contest, comparison = outcome.contest, Comparison(outcome.ours, outcome.peer)
        cells = [
            contest.title,
            _shown(Spread.of(outcome.ours), 0),
            f"{contest.peer.name}: {_shown(Spread.of(outcome.peer), 0)}",
            f"**{comparison.of_medians:.2f}**",
            _shown(comparison.paired, 2),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _wall_times(seconds: Mapping[str, Sequence[float]]) -> str:
    rows = ["| from start to end of | seconds, median (min to max) | times |", "|---|---|---|"]
    rows += [f"| {name} | {_shown(Spread.of(values), 2)} | {len(values)} |" for name, values in seconds.items()]
    return "\n".join(rows)


def _shown(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
