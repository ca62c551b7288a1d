"""A run in a storage service: a copy of it is read, and its launcher is reached through the service."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tfdist_cli.launch.run.history import Outcome, RunView
from tfdist_cli.run_storage.download import STATE, RunCopy
from tfdist_cli.run_storage.requests import StoredContact
from tfdist_cli.runs.source import RunSource
from tfdist_cli.spec.path_scheme import Url

_PERIOD = 5.0
"""Seconds between two looks at a run whose end is awaited: it is uploaded every 10 s."""


class StoredSource(RunSource):
    """A run in a storage service.

    Args:
        url: its address.
        path: the folder for its copy.
        files: patterns of the files that are read beside those that have its state.
    """

    def __init__(self, url: Url, path: Path, files: Sequence[str] = ()) -> None:
        super().__init__(path)
        self.url: Url = url
        self._files = (*STATE, *files)

    def refresh(self, files: Sequence[str] = ()) -> None:
        """Downloads what has changed.

        Raises:
            UsageError: there is no run, or the service cannot be used.
        """
        RunCopy(self.url, self.path, tuple(files) or self._files).refresh()

    def contact(self, view: RunView) -> StoredContact:  # noqa: ARG002 as for a directory
        """Returns what reaches the run's launcher, on whichever machine it is."""
        return StoredContact(self.url, self.path)

    def is_over(self, view: RunView) -> bool:
        """Returns whether the run has ended. If its launcher has disappeared, tasks may be left."""
        return view.outcome not in (Outcome.RUNNING, Outcome.LOST)

    def stop(self, view: RunView, *, now: bool, timeout: float) -> bool:
        """Stops the run, and waits until all of it is uploaded; see `StoredContact.stop`."""
        return self.contact(view).stop(view, now=now, timeout=timeout)

    def wait(self, view: RunView, timeout: float | None) -> bool:
        """Waits until the run has ended, and all of it is uploaded."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while view.outcome is Outcome.RUNNING:
            left = _PERIOD if deadline is None else min(_PERIOD, deadline - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)
            view = self.view()
        return True
