"""The interface of a tracker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

from tfdist_cli.tracking.description import Description
from tfdist_cli.tracking.measurements import Measurement


class Tracker(Protocol):
    """Keeps the measurements of one run.

    A method may raise any exception: it is called again later with the same arguments.
    """

    def open(self, run: Description) -> None:
        """Creates the tracked run, or continues that of an earlier process."""

    def describe(self, run: Description) -> None:
        """Writes the parameters and facts, which a resize or a restart changes."""

    def log(self, source: str, measurements: Sequence[Measurement]) -> None:
        """Adds measurements from a file of the run."""

    def close(self, exit_code: int | None) -> None:
        """Ends the tracked run for now; a later launch may continue it.

        Args:
            exit_code: that of the launcher; None if it was killed.
        """


@runtime_checkable
class RewritableTracker(Tracker, Protocol):
    """A tracker that can remove measurements.

    It is written again from the files, instead of being extended, by each process and after values of lost steps were
    removed.
    """

    def clear(self, source: str) -> None:
        """Removes all measurements from a file of the run."""


_MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "csv": "csv_file"}


def make_tracker(name: str, folder: Path) -> Tracker:
    """Imports a tracker and its library.

    Args:
        name: one of `TRACKERS`.
        folder: where the tracker keeps its files; it exists.
    """
    module = import_module(f"tfdist_cli.tracking.trackers.{_MODULES[name]}")
    make: Callable[[Path], Tracker] = module.make
    return make(folder)
