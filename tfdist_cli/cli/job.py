"""The job that a command runs: a cluster with a recipe, or with the user's program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.cli.console import console
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.registry import refuse_active_jobs
from tfdist_cli.launch.restart_rules import default_max_restarts, restart_rules
from tfdist_cli.launch.run.directory import check_run_dir, chosen_location, refuse_without_checkpoints, run_location
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, make_plan
from tfdist_cli.run_storage.recipe import RecipeFetcher
from tfdist_cli.run_storage.stored_run import in_service
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.loading.recipe_module import check_module
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """A job.

    Args:
        cluster: the cluster specification.
        recipe: the recipe to train; None for a program.
        program: argv of the user's program; empty for a recipe.
        run_dir: the run directory on this machine; None for a new one.
        url: its address in a storage service; None if it is only here.
    """

    cluster: Cluster
    recipe: Recipe | None
    program: tuple[str, ...]
    run_dir: Path | None
    url: Url | None = None

    @property
    def parent(self) -> Path:
        """The folder that holds the runs."""
        return self.cluster.local_runs or Path.cwd() / "runs"

    def preview(self, launcher: Launcher) -> Plan:
        """Returns the plan as far as it is known before the start. Ports that are chosen at the start are 0."""
        return make_plan(
            self.cluster,
            self.recipe,
            addresses=launcher.preview_addresses(self.cluster),
            run_dir=(self.run_dir or self.parent / self.cluster.name).absolute(),
            machine=Machine.here(),
            command=self.program,
        )

    def check_module(self) -> None:
        """Checks that the recipe's module exists before any task starts.

        Only launchers that run tasks on this machine are checked: containers and other hosts may have other modules.

        Raises:
            SpecError: the module does not exist.
        """
        if self.recipe is None or not self.cluster.launcher_traits.local_processes:
            return
        paths = [spec.env.get("PYTHONPATH", "") for role in ROLES if (spec := self.cluster.roles.of(role))]
        folders = [folder for path in paths for folder in path.split(os.pathsep) if folder]
        check_module(self.recipe, str(self.cluster.recipe), [*folders, str(Path.cwd())])

    def check_run_dir(self) -> None:
        """Checks that a launch can use the run directory, without creating it.

        Raises:
            UsageError: it cannot.
        """
        check_run_dir(self.run_dir, self.parent, self.refuse_run_dir)

    def refuse_run_dir(self, path: Path) -> None:
        """Checks that an earlier run's directory is free, and that this job continues its training.

        Raises:
            UsageError: a job of a scheduler uses it, or the recipe would not continue from its checkpoints.
        """
        refuse_active_jobs(path)
        refuse_without_checkpoints(path, self.recipe)

    def rules(self, timeouts: Timeouts, max_restarts: int | None) -> JobPolicy:
        """Returns the policy of restarts and timeouts. By default the limit is at least each role's `restart.max`."""
        given = restart_rules(self.cluster)
        if max_restarts is None:
            max_restarts = max([default_max_restarts(self.recipe), *(spec.max or 0 for spec in given.values())])
        return JobPolicy(self.cluster.strategy, self.recipe is not None, timeouts, max_restarts, given)


def load_job(
    cluster: Path,
    recipe: Path | None,
    overrides: Sequence[str],
    command: Sequence[str] | None,
    run_dir: str | None = None,
) -> Job:
    """Loads the files of a job.

    Args:
        cluster: the cluster file.
        recipe: the recipe file; by default the one that the cluster file names.
        overrides: `PATH=VALUE` strings of `--set`.
        command: argv of a program to run instead of a recipe.
        run_dir: the run directory, or its address in a storage service; by default a new one.

    Raises:
        UsageError: a file is invalid, there is nothing to run, or both a recipe and a program are given.
    """
    chosen = chosen_location(run_dir)
    fetcher = RecipeFetcher(chosen)
    spec, trained = load_run(cluster, recipe, overrides, fetch=fetcher)
    console.print_warnings(fetcher.warnings)
    program = tuple(command or ())
    if program and recipe:
        raise UsageError(
            "--recipe and a program exclude each other", code="recipe-and-program", hint="remove one of them"
        )
    if not program and trained is None:
        raise UsageError(
            f"nothing to run: {cluster} names no recipe",
            code="nothing-to-run",
            hint="set 'recipe' in the file, pass --recipe FILE, or pass a program after '--'",
        )
    at, local = run_location(chosen, spec)
    recipe_to_train = None if program else trained
    if isinstance(at, Url):
        stored = in_service(recipe_to_train, at) if recipe_to_train else None
        return Job(spec, stored, program, local, at)
    return Job(spec, recipe_to_train, program, at)
