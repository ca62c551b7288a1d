"""The results of a benchmark: one row per variant, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.measure import Rate, Split
from tfdist_cli.protocol.phases import PHASES, TRAFFIC

TITLES = {
    **{name: name.replace("_", "-") for name in PHASES},
    "pulled": "pulled",
    "pushed": "pushed",
    "reduced": "all-reduced",
}
"""Titles of phases and of bytes in tables."""


@dataclass(frozen=True)
class Row:
    """The measurements of one variant.

    Args:
        name: its name in tables.
        workers: number of workers that compute gradients.
        alone: whether it is the single-process baseline.
        rates: one per round.
        split: the phases of a step; None if they cannot be measured.
    """

    name: str
    workers: int
    alone: bool
    rates: tuple[Rate, ...]
    split: Split | None

    @property
    def steps(self) -> Spread:
        """Steps per second."""
        return Spread.of([rate.steps for rate in self.rates])

    @property
    def examples(self) -> Spread:
        """Examples per second."""
        return Spread.of([rate.examples for rate in self.rates])


@dataclass(frozen=True)
class Results:
    """The results of all variants.

    Args:
        title: recipe and cluster.
        machine: description of the machine.
        steps: measured steps of each worker in a run.
        others: largest share of the machine that other processes used during a run.
        rows: one per variant; the single process is the last.
    """

    title: str
    machine: str
    steps: int
    others: float
    rows: tuple[Row, ...]

    def efficiency(self, row: Row) -> float | None:
        """Returns examples per second and worker, relative to the smallest cluster; None for the single process."""
        first = self.rows[0]
        if row.alone or first.alone:
            return None
        return (row.examples.median / row.workers) / (first.examples.median / first.workers)

    def tables(self) -> list[list[list[str]]]:
        """Returns the tables that have rows. The first row of each is its header."""
        return [table for table in (self.rates(), self.phases(), self.traffic()) if len(table) > 1]

    def rates(self) -> list[list[str]]:
        """Returns the table of rates."""
        table = [["", "steps/s", "examples/s", "efficiency"]]
        for row in self.rows:
            share = self.efficiency(row)
            table.append([row.name, row.steps.shown(1), row.examples.shown(0), "" if share is None else f"{share:.0%}"])
        return table

    def phases(self) -> list[list[str]]:
        """Returns the table of phases in ms; only its header if they cannot be measured."""
        splits = [(row.name, row.split) for row in self.rows if row.split]
        names = [name for name in PHASES if any(name in split.phases for _, split in splits)]
        table = [["ms a step", *(TITLES[name] for name in names), "rest", "step"]]
        for name, split in splits:
            parts = [f"{split.phases[each]:.2f}" if each in split.phases else "" for each in names]
            table.append([name, *parts, f"{split.rest:.2f} ({split.rest / split.step:.0%})", f"{split.step:.2f}"])
        return table

    def traffic(self) -> list[list[str]]:
        """Returns the table of bytes per step; only its header if there is no traffic."""
        splits = [(row.name, row.split.traffic) for row in self.rows if row.split and row.split.traffic]
        names = [name for name in TRAFFIC if any(name in sizes for _, sizes in splits)]
        cells = [[name, *(f"{sizes[each]:,.0f}" if each in sizes else "" for each in names)] for name, sizes in splits]
        return [["bytes a step", *(TITLES[name] for name in names)], *cells]

    def notes(self) -> Iterator[str]:
        """Yields notes on how to read the tables."""
        rounds = len(self.rows[0].rates)
        yield (
            f"Median (min to max) of {rounds} run{'s' if rounds > 1 else ''} of {self.steps} steps of each worker. "
            f"Other processes used up to {self.others:.0%} of the machine during a run."
        )
        first = self.rows[0]
        if not first.alone and len(self.rows) > 1:
            yield f"Efficiency is examples per second and worker, against {first.name}."
        paces = [row.steps.median / row.split.steps_per_second for row in self.rows if row.split]
        if paces:
            shown = " to ".join(dict.fromkeys(f"{pace:.0%}" for pace in (min(paces), max(paces))))
            yield (
                "The phases come from one more run, which measures them: "
                f"its steps took {shown} of the time of the other runs."
            )
        else:
            yield (
                "Phases are measured neither with GPUs, which run operations asynchronously, nor with stages of a "
                "model, which compute at the same time."
            )

    def as_json(self) -> dict[str, Any]:
        """Returns the results in plain JSON types."""
        return {
            "title": self.title,
            "machine": self.machine,
            "steps": self.steps,
            "others": round(self.others, 3),
            "rows": [
                {
                    "name": row.name,
                    "workers": row.workers,
                    "one_process": row.alone,
                    "steps_per_second": spread_as_json(row.steps, [rate.steps for rate in row.rates]),
                    "examples_per_second": spread_as_json(row.examples, [rate.examples for rate in row.rates]),
                    "efficiency": self.efficiency(row),
                    "split": row.split and _split(row.split),
                }
                for row in self.rows
            ],
        }

    def as_markdown(self, plot: str | None = None) -> str:
        """Returns the results as a Markdown page.

        Args:
            plot: path of the plot in the page.
        """
        parts = [f"# {self.title}", f"{self.machine}.", *map(markdown_table, self.tables()), *self.notes()]
        if plot:
            parts.insert(2, f"![Examples per second, and the phases of a step]({plot})")
        return "\n\n".join(parts) + "\n"


def spread_as_json(spread: Spread, rounds: list[float]) -> dict[str, Any]:
    """Returns a spread, and what it is the spread of, in plain JSON types."""
    values = {"median": spread.median, "min": spread.low, "max": spread.high}
    return {name: round(value, 3) for name, value in values.items()} | {"rounds": [round(each, 3) for each in rounds]}


def _split(split: Split) -> dict[str, Any]:
    return {
        "ms_per_step": {name: round(each, 4) for name, each in split.phases.items()}
        | {"rest": round(split.rest, 4), "step": round(split.step, 4)},
        "bytes_per_step": dict(split.traffic),
        "steps_per_second": round(split.steps_per_second, 3),
    }


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; its first row is the header."""
    heads, *rows = table
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
