"""Runs by their directory, or by their address in a storage service, of which a copy is read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tfdist_cli.launch.manual import wait_for_manual
from tfdist_cli.launch.run.history import RunView, read_run
from tfdist_cli.launch.run.requests import Contact, LocalContact
from tfdist_cli.launch.stopping import has_exited_within, is_over, stop_run
from tfdist_cli.spec.path_scheme import Url, checked_location


class RunSource:
    """A run in a directory of this machine.

    Args:
        path: the directory.
    """

    url: Url | None = None
    """Its address, if it is read from a storage service."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refresh(self, files: Sequence[str] = ()) -> None:
        """Brings the directory up to date, which it always is here.

        Args:
            files: patterns of the files that are needed; by default those that were needed when the run was opened.
        """

    def view(self) -> RunView:
        """Returns the run's state.

        Raises:
            UsageError: it is no run, or cannot be read.
        """
        self.refresh()
        return read_run(self.path)

    def contact(self, view: RunView) -> Contact:
        """Returns what reaches the run's launcher."""
        return LocalContact(view)

    def is_over(self, view: RunView) -> bool:
        """Returns whether nothing of the run is left that could be stopped."""
        return is_over(view)

    def stop(self, view: RunView, *, now: bool, timeout: float) -> bool:
        """Stops the run, and waits for its end.

        Args:
            view: the run.
            now: whether to kill its tasks at once, without a checkpoint.
            timeout: seconds to wait.

        Returns:
            Whether it has ended.
        """
        return stop_run(view, now=now, timeout=timeout)

    def wait(self, view: RunView, timeout: float | None) -> bool:
        """Waits until the run has ended.

        Args:
            view: the run.
            timeout: seconds to wait; None for no limit.

        Returns:
            Whether it has ended.
        """
        if view.manual:
            return wait_for_manual(view.path, timeout)
        if view.launcher is not None:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                return has_exited_within(psutil.Process(view.launcher), timeout)
        return True


@contextmanager
def open_run(run: str | Path, files: Sequence[str] = ()) -> Iterator[RunSource]:
    """Yields a run. A copy of it is removed when the context is left.

    Args:
        run: its directory or its address.
        files: patterns of the files that are read beside those that have its state.

    Raises:
        UsageError: there is no run at the address, or it cannot be used.
    """
    at = checked_location(run)
    if isinstance(at, Path):
        yield RunSource(at)
        return
    from tfdist_cli.runs.stored import StoredSource  # noqa: PLC0415 a directory needs none of it

    with tempfile.TemporaryDirectory(prefix="tfdist-run-") as folder:
        source = StoredSource(at, Path(folder) / at.name, files)
        source.refresh()
        yield source


@contextmanager
def open_runs(runs: Sequence[str], files: Sequence[str] = ()) -> Iterator[list[RunSource]]:
    """Yields several runs; see `open_run`."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_run(run, files)) for run in runs]


def runs_at(parent: Url) -> Sequence[str]:
    """Returns the addresses of the runs in a folder of a storage service."""
    from tfdist_cli.run_storage.download import runs_in_service  # noqa: PLC0415 as above

    return list(runs_in_service(parent))
