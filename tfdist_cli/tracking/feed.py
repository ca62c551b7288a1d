"""Passes the new lines of a run's files to a tracker."""

from __future__ import annotations

from pathlib import Path

from tfdist_cli.tracking.description import Describer, Description
from tfdist_cli.tracking.follower import Follower
from tfdist_cli.tracking.measurements import SOURCES, Reader
from tfdist_cli.tracking.tracker import RewritableTracker, Tracker


class Feed:
    """What one tracker has of a run.

    Args:
        run: the run's directory.
        tracker: the tracker.
        folder: keeps how much the tracker has, unless it is written again.
    """

    def __init__(self, run: Path, tracker: Tracker, folder: Path) -> None:
        self._tracker = tracker
        self._rewritable = tracker if isinstance(tracker, RewritableTracker) else None
        positions = None if self._rewritable else folder
        self._followers = {name: Follower(run / name, positions and positions / f"{name}.lines") for name in SOURCES}
        self._outdated = set(SOURCES) if self._rewritable else set()
        """The files of which the tracker is to be written again."""
        self._reader = Reader(run)
        self._describer = Describer(run)
        self._described: Description | None = None
        self._is_open = False

    def pass_on(self) -> None:
        """Passes on what is new. After an exception the next call continues where this one stopped."""
        description = self._describer.read()
        if not self._is_open:
            self._tracker.open(description)
            self._is_open = True
        if description != self._described:
            self._tracker.describe(description)
            self._described = description
        for source, follower in self._followers.items():
            if follower.rewound() and self._rewritable:
                self._outdated.add(source)
            self._pass_on(source, follower)

    def close(self, exit_code: int | None) -> None:
        """Ends the tracked run.

        Args:
            exit_code: that of the launcher; None if it was killed.
        """
        self._tracker.close(exit_code)

    def _pass_on(self, source: str, follower: Follower) -> None:
        if self._rewritable and source in self._outdated:
            self._rewritable.clear(source)
            follower.restart()
            self._outdated.discard(source)
        try:
            for lines in follower.parts():
                self._tracker.log(source, [each for line in lines for each in self._reader.read(source, line)])
        except Exception:
            if self._rewritable:
                self._outdated.add(source)  # a part of the lines may have been written
            raise
