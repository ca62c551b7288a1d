"""The interface of a tracker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from tfdist_cli.tracking.description import Description
from tfdist_cli.tracking.measurements import Measurement


class Tracker(Protocol):
    """Keeps the measurements of one run.

    A method may raise any exception: it is called again later with the same arguments.
    """

    replays: bool
    """Whether the tracker is rewritten from the files, instead of being extended, by each process and after values of
    lost steps were removed."""

    def open(self, run: Description) -> None:
        """Creates the tracked run, or continues that of an earlier process."""

    def describe(self, run: Description) -> None:
        """Writes the parameters and facts, which a resize or a restart changes."""

    def clear(self, source: str) -> None:
        """Removes all measurements from a file of the run. Only called if the tracker `replays`."""

    def log(self, source: str, measurements: Sequence[Measurement]) -> None:
        """Adds measurements from a file of the run."""

    def close(self, exit_code: int | None) -> None:
        """Ends the tracked run for now; a later launch may continue it.

        Args:
            exit_code: that of the launcher; None if it was killed.
        """


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
