"""Runs that a command reads: directories, or addresses in storage services, which are copied for the while."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist_cli.cli.options import LATEST
from tfdist_cli.spec.path_scheme import Url, checked_location

if TYPE_CHECKING:
    from tfdist_cli.run_storage.download import RunCopy


@dataclass(frozen=True)
class RunSource:
    """A run's directory on this machine.

    Args:
        path: the directory, or a copy of it.
        copy: what refreshes the copy; None for a directory.
    """

    path: Path
    copy: RunCopy | None = None

    def refresh(self) -> None:
        """Downloads what has changed."""
        if self.copy:
            self.copy.refresh()


@contextmanager
def open_run(run: str, files: Sequence[str] = ()) -> Iterator[RunSource]:
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
    from tfdist_cli.run_storage.download import STATE, RunCopy  # noqa: PLC0415 a directory needs none of it

    with tempfile.TemporaryDirectory(prefix="tfdist-run-") as folder:
        copy = RunCopy(at, Path(folder) / at.name, (*STATE, *files))
        copy.refresh()
        yield RunSource(copy.path, copy)


@contextmanager
def open_runs(runs: Sequence[str] | None, files: Sequence[str] = ()) -> Iterator[list[RunSource]]:
    """Yields several runs; the latest one by default. See `open_run`."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_run(run, files)) for run in runs or [str(LATEST)]]


def runs_at(parent: Url) -> Sequence[str]:
    """Returns the addresses of the runs in a folder of a storage service."""
    from tfdist_cli.run_storage.download import runs_in_service  # noqa: PLC0415 as above

    return list(runs_in_service(parent))
