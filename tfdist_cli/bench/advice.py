"""Which settings make a training faster: each was measured against the settings as they are, and one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.bench.candidates import Candidate
from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.results import Row, markdown_table, spread_as_json
from tfdist_cli.bench.trials import Trial


@dataclass(frozen=True)
class Advice:
    """The measurements of all candidates.

    Args:
        title: recipe and cluster.
        machine: description of the machine.
        steps: measured steps of each worker in a run.
        others: largest share of the machine that other processes used during a run.
        cluster_file: where keys of the cluster are set.
        recipe_file: where keys of the recipe are set.
        base: the settings as they are.
        alone: one process; None if the cluster is one process.
        tried: the candidates, each with its measurements or its error.
    """

    title: str
    machine: str
    steps: int
    others: float
    cluster_file: Path
    recipe_file: Path
    base: Row
    alone: Row | None
    tried: tuple[Trial, ...]

    @property
    def noise(self) -> float:
        """How much runs of the settings as they are differ, relative to their median. A smaller gain is no gain."""
        return _relative_range(self.base.examples)

    @property
    def faster_alone(self) -> float | None:
        """How many times as fast one process is, if it is faster than the cluster."""
        if self.alone is None:
            return None
        return self.gain(self.alone) + 1 if self._helps(self.alone) else None

    def gain(self, row: Row) -> float:
        """The gain of other settings, 0.5 for one and a half times as many examples a second."""
        return row.examples.median / self.base.examples.median - 1

    def _helps(self, row: Row) -> bool:
        """Whether the gain of other settings exceeds what their own runs, and those of the base, differ by."""
        return self.gain(row) > max(self.noise, _relative_range(row.examples))

    @property
    def helpful(self) -> list[tuple[Candidate, float]]:
        """The candidates that help, and their gains, the largest first."""
        helping = [each for each in self._measured if self._helps(each.row)]
        gains = [(each.candidate, self.gain(each.row)) for each in helping if each.candidate]
        return sorted(gains, key=lambda each: -each[1])

    def warning(self) -> str | None:
        """Warns of a cluster that is slower than one process."""
        if self.faster_alone is None:
            return None
        return (
            f"one process is {self.faster_alone:.2g} times as fast as this cluster: {self._examples(self.alone)} "
            f"examples/s against {self._examples(self.base)}, on this machine"
        )

    def lines(self) -> Iterator[str]:
        """Yields the advice: the changes that help, the largest gain first, each with the lines to write."""
        helpful = self.helpful
        if not helpful:
            yield (
                f"No change helps: none gains more than {self.noise:.0%}, by which runs of the settings as they are "
                "differ, and than its own runs differ."
            )
        for number, (candidate, gain) in enumerate(helpful, 1):
            yield f"{number}. {gain:+.0%} with, in {self._file(candidate)}:"
            yield f"     {candidate.yaml}"
            yield f"   Effect on the training: {candidate.effect}."
        if len(helpful) > 1:
            yield "Each was measured alone: use one, or measure several together with --set."

    def table(self) -> list[list[str]]:
        """Returns the table of all measurements. The first row is its header."""
        rows = [["settings", "examples/s", "gain"], [self.base.name, self.base.examples.shown(0), ""]]
        measured = sorted((each.row for each in self._measured), key=self.gain, reverse=True)
        compared = [*measured, *([self.alone] if self.alone else [])]
        rows += [[row.name, row.examples.shown(0), f"{self.gain(row):+.0%}"] for row in compared]
        return [*rows, *([each.name, "failed", ""] for each in self.tried if each.error)]

    def notes(self) -> Iterator[str]:
        """Yields notes on how to read the table."""
        yield (
            f"Median (min to max) of {len(self.base.rates)} runs of {self.steps} steps of each worker. A gain counts "
            f"if it exceeds {self.noise:.0%}, by which runs of the settings as they are differ, and by which its own "
            f"runs differ. Other processes used up to {self.others:.0%} of the machine during a run."
        )
        for each in self.tried:
            if each.error:
                yield f"{each.name} failed: {each.error}"

    def as_json(self) -> dict[str, Any]:
        """Returns the advice in plain JSON types."""
        return {
            "title": self.title,
            "machine": self.machine,
            "steps": self.steps,
            "others": round(self.others, 3),
            "noise": round(self.noise, 4),
            "slower_than_one_process": self.faster_alone is not None,
            "base": _row_as_json(self.base),
            "one_process": _row_as_json(self.alone),
            "candidates": [self._candidate_as_json(each, each.candidate) for each in self.tried if each.candidate],
        }

    def as_markdown(self) -> str:
        """Returns the advice as a Markdown page."""
        warning = self.warning()
        parts = [f"# {self.title}", *([f"**Warning:** {warning}."] if warning else []), f"{self.machine}."]
        parts += ["```text\n" + "\n".join(self.lines()) + "\n```", markdown_table(self.table()), *self.notes()]
        return "\n\n".join(parts) + "\n"

    def _candidate_as_json(self, trial: Trial, candidate: Candidate) -> dict[str, Any]:
        gain = None if trial.error else self.gain(trial.row)
        return {
            "set": list(candidate.changes),
            "file": str(self._file(candidate)),
            "yaml": candidate.yaml,
            "effect": candidate.effect,
            "examples_per_second": None if trial.error else _row_as_json(trial.row),
            "gain": None if gain is None else round(gain, 4),
            "helps": not trial.error and self._helps(trial.row),
            "error": trial.error or None,
        }

    @property
    def _measured(self) -> list[Trial]:
        return [each for each in self.tried if not each.error]

    def _file(self, candidate: Candidate) -> Path:
        return self.cluster_file if candidate.is_in_cluster else self.recipe_file

    def _examples(self, row: Row | None) -> str:
        return f"{row.examples.median:,.0f}" if row else ""


def _relative_range(spread: Spread) -> float:
    return (spread.high - spread.low) / spread.median


def _row_as_json(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else spread_as_json(row.examples, [rate.examples for rate in row.rates])
