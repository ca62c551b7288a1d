"""What a command is to run: a cluster, with a recipe or a program of the user's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.restart_rules import default_max_restarts, restart_rules
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, make_plan
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.loading.recipe_module import check_module
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """What is asked for: a cluster, and a recipe or a program for its tasks."""

    cluster: Cluster
    recipe: Recipe | None
    program: tuple[str, ...]
    run_dir: Path | None

    @property
    def parent(self) -> Path:
        """The folder of runs."""
        return self.cluster.run_dir or Path.cwd() / "runs"

    def foreseen(self, launcher: Launcher) -> Plan:
        """The plan as far as it is known before the start; a port that is chosen then is 0."""
        return make_plan(
            self.cluster,
            self.recipe,
            addresses=launcher.preview_addresses(self.cluster),
            run_dir=(self.run_dir or self.parent / self.cluster.name).absolute(),
            machine=Machine.here(),
            command=self.program,
        )

    def check_module(self) -> None:
        """Looks for the recipe's module before anything is started, where the tasks look on this machine.

        Other machines, and containers, may have it installed where this one has not.

        Raises:
            SpecError: there is no such module.
        """
        if self.recipe is None or not self.cluster.launcher_traits.local_processes:
            return
        paths = [spec.env.get("PYTHONPATH", "") for role in ROLES if (spec := self.cluster.roles.of(role))]
        folders = [folder for path in paths for folder in path.split(os.pathsep) if folder]
        check_module(self.recipe, str(self.cluster.recipe), [*folders, str(Path.cwd())])

    def rules(self, timeouts: Timeouts, max_restarts: int | None) -> JobPolicy:
        """When the job is over; a role that says how often it may be restarted need not be allowed to once more."""
        given = restart_rules(self.cluster)
        if max_restarts is None:
            max_restarts = max([default_max_restarts(self.recipe), *(spec.max or 0 for spec in given.values())])
        return JobPolicy(self.cluster.strategy, self.recipe is not None, timeouts, max_restarts, given)


def load_job(
    cluster: Path,
    recipe: Path | None,
    overrides: Sequence[str],
    command: Sequence[str] | None,
    run_dir: Path | None = None,
) -> Job:
    """Loads the files that a user names.

    Args:
        cluster: the cluster file.
        recipe: the recipe's, in place of the one that the cluster names.
        overrides: what is set in either, as `--set` takes it.
        command: a program of the user's own, which is run instead of a recipe.
        run_dir: the run's directory; by default a new one.

    Raises:
        UsageError: something is wrong with them, or there is nothing to run, or too much.
    """
    spec, trained = load_run(cluster, recipe, overrides)
    program = tuple(command or ())
    if program and recipe:
        raise UsageError("both --recipe and a program are given", hint="leave out the one that is not to run")
    if not program and trained is None:
        raise UsageError(
            f"there is nothing to run: {cluster} names no recipe",
            hint="name one with --recipe, or as 'recipe' in the file, or give a program after '--'",
        )
    return Job(spec, None if program else trained, program, run_dir)
