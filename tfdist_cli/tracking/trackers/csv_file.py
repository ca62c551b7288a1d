"""`tracking/metrics.csv`, `evaluation.csv` and `resources.csv`: a line for each value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from tfdist_cli.tracking.description import Description
from tfdist_cli.tracking.measurements import Measurement

HEADER = ("time", "series", "step", "name", "value")


class CsvTracker:
    """Writes CSV files in the long form that spreadsheets and data frames pivot.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, run: Description) -> None:
        """Nothing is kept open."""

    def describe(self, run: Description) -> None:
        """Writes `parameters.csv`."""
        with (self._folder / "parameters.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("name", "value"))
            writer.writerows((run.facts | run.parameters).items())

    def clear(self, source: str) -> None:
        """Writes a file that has only the header."""
        with self._path(source).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(HEADER)

    def log(self, source: str, measurements: Sequence[Measurement]) -> None:
        """Appends lines; all or none."""
        path = self._path(source)
        size = path.stat().st_size
        try:
            with path.open("a", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                for each in measurements:
                    when = datetime.fromtimestamp(each.time, timezone.utc).isoformat(timespec="milliseconds")
                    writer.writerow((when, each.series, each.step, each.name, each.value))
        except OSError:
            with path.open("rb+") as file:
                file.truncate(size)
            raise

    def close(self, exit_code: int | None) -> None:
        """Nothing is open."""

    def _path(self, source: str) -> Path:
        return self._folder / f"{Path(source).stem}.csv"


def make(folder: Path) -> CsvTracker:
    """Returns the tracker of a run."""
    return CsvTracker(folder)
