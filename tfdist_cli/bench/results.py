"""What all runs come to: a row for each variant, as JSON and as Markdown."""

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
"""What tables call phases and bytes."""


@dataclass(frozen=True)
class Row:
    """What was measured of one variant.

    Args:
        name: what tables call it.
        workers: how many computed gradients.
        alone: whether it is the one process beside the cluster.
        rates: one of each round.
        split: where the time of a step went; None where that cannot be told.
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
    """All of it.

    Args:
        title: what was trained on what.
        machine: where.
        steps: measured steps of each worker in a run.
        others: the largest share of the machine that other processes used during one of the runs.
        rows: one for each variant; the one process comes last.
    """

    title: str
    machine: str
    steps: int
    others: float
    rows: tuple[Row, ...]

    def efficiency(self, row: Row) -> float | None:
        """Examples per second and worker, as a share of what the fewest workers have; None beside the cluster."""
        first = self.rows[0]
        if row.alone or first.alone:
            return None
        return (row.examples.median / row.workers) / (first.examples.median / first.workers)

    def tables(self) -> list[list[list[str]]]:
        """The tables that have something in them, each with its heads first."""
        return [table for table in (self.rates(), self.phases(), self.traffic()) if len(table) > 1]

    def rates(self) -> list[list[str]]:
        """The table of rates, its heads first."""
        table = [["", "steps/s", "examples/s", "efficiency"]]
        for row in self.rows:
            share = self.efficiency(row)
            table.append([row.name, row.steps.shown(1), row.examples.shown(0), "" if share is None else f"{share:.0%}"])
        return table

    def phases(self) -> list[list[str]]:
        """The table of milliseconds in a step, its heads first; only heads where they cannot be told."""
        splits = [(row.name, row.split) for row in self.rows if row.split]
        names = [name for name in PHASES if any(name in split.phases for _, split in splits)]
        table = [["ms a step", *(TITLES[name] for name in names), "rest", "step"]]
        for name, split in splits:
            parts = [f"{split.phases[each]:.2f}" if each in split.phases else "" for each in names]
            table.append([name, *parts, f"{split.rest:.2f} ({split.rest / split.step:.0%})", f"{split.step:.2f}"])
        return table

    def traffic(self) -> list[list[str]]:
        """The table of bytes in a step, its heads first; only heads where none crosses."""
        splits = [(row.name, row.split.traffic) for row in self.rows if row.split and row.split.traffic]
        names = [name for name in TRAFFIC if any(name in sizes for _, sizes in splits)]
        cells = [[name, *(f"{sizes[each]:,.0f}" if each in sizes else "" for each in names)] for name, sizes in splits]
        return [["bytes a step", *(TITLES[name] for name in names)], *cells]

    def notes(self) -> Iterator[str]:
        """What a reader of the tables has to know."""
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
                "The parts of a step are those of one more run, which takes the time of each: "
                f"a step took {shown} of what it takes without."
            )
        else:
            yield "A GPU takes work over long before it has done it: what a step's time is spent on is not told."

    def as_json(self) -> dict[str, Any]:
        """All of it in plain JSON types."""
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
                    "steps_per_second": _spread(row.steps, [rate.steps for rate in row.rates]),
                    "examples_per_second": _spread(row.examples, [rate.examples for rate in row.rates]),
                    "efficiency": self.efficiency(row),
                    "split": row.split and _split(row.split),
                }
                for row in self.rows
            ],
        }

    def as_markdown(self, plot: str | None = None) -> str:
        """A page.

        Args:
            plot: the file with the plot, as the page is to name it.
        """
        parts = [f"# {self.title}", f"{self.machine}.", *map(_markdown, self.tables()), *self.notes()]
        if plot:
            parts.insert(2, f"![Examples per second, and the parts of a step]({plot})")
        return "\n\n".join(parts) + "\n"


def _spread(spread: Spread, rounds: list[float]) -> dict[str, Any]:
    values = {"median": spread.median, "min": spread.low, "max": spread.high}
    return {name: round(value, 3) for name, value in values.items()} | {"rounds": [round(each, 3) for each in rounds]}


def _split(split: Split) -> dict[str, Any]:
    return {
        "ms_per_step": {name: round(each, 4) for name, each in split.phases.items()}
        | {"rest": round(split.rest, 4), "step": round(split.step, 4)},
        "bytes_per_step": dict(split.traffic),
        "steps_per_second": round(split.steps_per_second, 3),
    }


def _markdown(table: Sequence[Sequence[str]]) -> str:
    heads, *rows = table
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
