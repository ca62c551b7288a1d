"""Imports the classes that the table of launchers names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.spec.launchers import LAUNCHERS
from tfdist_cli.spec.sections.cluster import Cluster


class SchedulerJobs(Protocol):
    """The jobs of a launcher's scheduler that continue when the launcher is killed."""

    def refuse_active(self, run_dir: Path) -> None:
        """Refuses a run directory whose job is active.

        Raises:
            UsageError: the job is active.
        """

    def is_active(self, run_dir: Path) -> bool:
        """Whether the run has an active job."""

    def end(self, run_dir: Path) -> bool:
        """Ends the run's job, if it has one; returns whether none is active any more."""


def launcher_of(cluster: Cluster) -> Launcher:
    """Returns a new launcher for the cluster's tasks."""
    launcher: Launcher = _load(cluster.launcher_traits.implementation)
    return launcher


def scheduler_jobs() -> Iterator[SchedulerJobs]:
    """Yields the job classes of all launchers: a run directory may belong to a run of any launcher."""
    for traits in LAUNCHERS.values():
        if traits.jobs:
            yield _load(traits.jobs)


def refuse_active_jobs(run_dir: Path) -> None:
    """Refuses a run directory that has an active job of any scheduler.

    Raises:
        UsageError: a job is active.
    """
    for jobs in scheduler_jobs():
        jobs.refuse_active(run_dir)


def _load(path: str) -> Any:
    """Imports and calls a class, `package.module:Class`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)()
