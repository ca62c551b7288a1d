"""`tfdist launch`: every task of a cluster on this machine, to the end of the training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli import console
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, RecipeOption, SetOption
from tfdist_cli.cli.plan import print_plan
from tfdist_cli.cli.progress import Display, LiveDisplay
from tfdist_cli.cli.requirements import require_tensorflow
from tfdist_cli.cli.summary import print_failure, print_report
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.base import Launcher
from tfdist_cli.launch.chronicle import Chronicle
from tfdist_cli.launch.job import Watcher
from tfdist_cli.launch.launch import Launch
from tfdist_cli.launch.local import LocalLauncher
from tfdist_cli.launch.report import Report
from tfdist_cli.launch.run_dir import open_run_dir
from tfdist_cli.launch.state import Rules, Timeouts
from tfdist_cli.plan import make_plan
from tfdist_cli.resources import Machine
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.load import load_run
from tfdist_cli.spec.recipe import Recipe
from tfdist_cli.spec.task_id import ROLES

EXAMPLES = (
    "tfdist launch configs/local.yaml",
    "tfdist launch cluster.yaml --recipe recipe.yaml --set train.epochs=3 --set roles.worker.replicas=4",
    "tfdist launch cluster.yaml -- python train.py --lr 0.1",
)
MAX_RESTARTS = 3
"""Restarts of a recipe that has checkpoints; without them a restart loses everything."""
STALL_TIMEOUT = 600.0
_DEFAULTS = Timeouts()


def launch(  # noqa: PLR0913 a parameter is an option
    cluster: ClusterArgument,
    command: CommandArgument = None,
    *,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run's directory, of an earlier run to go on there; by default a new one below runs/."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no lines of tasks and no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of the run as JSON.")] = False,
    start_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds until every task of a recipe has to have come up.")
    ] = _DEFAULTS.start,
    evaluator_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds the evaluator has for the last checkpoint after the training.")
    ] = _DEFAULTS.evaluator,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds between telling a task to end and killing it.")
    ] = _DEFAULTS.shutdown,
    stall_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds in which the training has to make a step, and each task to give a sign of life; 0 for no "
            "limit. 600 for a recipe, 0 for a program.",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often lost tasks are started again. 3 for a recipe that has checkpoints, otherwise 0.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a cluster on this machine and train a recipe, or run your own program in each task.

    Each task has its TF_CONFIG, its share of the machine and a log in the run's directory. A lost task is started
    again, alone or with all the others from the last checkpoint, up to --max-restarts times. A failure that ends the
    job is told with the last lines of its log. Ctrl-C lets the training save a checkpoint and end; a second one
    kills it.

    Exit codes: 0 done, 2 bad usage or configuration, 124 a timeout or a stall, 130 Ctrl-C, 143 SIGTERM, otherwise the
    code of the task that failed first, 128 + n if signal n killed it.
    """
    spec, trained = load_run(cluster, recipe, overrides or ())
    program = tuple(command or ())
    if program and recipe:
        raise UsageError("both --recipe and a program are given", hint="leave out the one that is not to run")
    if not program and trained is None:
        raise UsageError(
            f"there is nothing to run: {cluster} names no recipe",
            hint="name one with --recipe, or as 'recipe' in the file, or give a program after '--'",
        )
    job = Job(spec, None if program else trained, program, run_dir)
    if dry_run:
        _print_dry_run(LocalLauncher(), job)
        return
    _check_runs_here(job)
    stall = (0.0 if program else STALL_TIMEOUT) if stall_timeout is None else stall_timeout
    timeouts = Timeouts(start_timeout, evaluator_timeout, shutdown_timeout, stall)
    rules = job.rules(timeouts, max_restarts)
    report, path = carry_out(LocalLauncher(), job, rules, quiet=quiet)
    print_failure(report)
    if as_json:
        console.write(json.dumps(report.as_json() | {"run_dir": str(path)}, indent=2))
    else:
        print_report(report, path)
    raise typer.Exit(report.exit_code)


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

    def rules(self, timeouts: Timeouts, max_restarts: int | None) -> Rules:
        """When the job is over; a role that says how often it may be restarted need not be allowed to once more."""
        given = {role: spec.restart for role in ROLES if (spec := self.cluster.roles.of(role)) and spec.restart}
        if max_restarts is None:
            own = MAX_RESTARTS if self.recipe and self.recipe.checkpoint else 0
            max_restarts = max([own, *(spec.max or 0 for spec in given.values())])
        return Rules(self.cluster.strategy, self.recipe is not None, timeouts, max_restarts, given)


def carry_out(launcher: Launcher, job: Job, rules: Rules, *, quiet: bool) -> tuple[Report, Path]:
    """Runs a job to its end.

    Returns:
        What came of it, and the run's directory.
    """
    now = datetime.now().astimezone()
    with (
        launcher.reserve(job.cluster) as addresses,
        open_run_dir(job.run_dir, job.parent, job.cluster.name, now) as opened,
    ):
        cluster, recipe = opened.resolve(job.cluster, job.recipe, addresses)
        plan = make_plan(
            cluster, recipe, addresses=addresses, run_dir=opened.path, machine=Machine.here(), command=job.program
        )
        opened.save(plan)
        chronicle = Chronicle()
        with _watching(chronicle, quiet=quiet) as watchers:
            return Launch(launcher, plan, opened, rules).carry_out(chronicle, watchers), opened.path


def _print_dry_run(launcher: Launcher, job: Job) -> None:
    """Prints the plan, and the commands that it comes to; a port that is chosen at the start is 0."""
    plan = make_plan(
        job.cluster,
        job.recipe,
        addresses={task: job.cluster.address(task) for task in job.cluster.tasks},
        run_dir=(job.run_dir or job.parent / job.cluster.name).absolute(),
        machine=Machine.here(),
        command=job.program,
    )
    print_plan(plan)
    console.write(launcher.render(plan))


def _check_runs_here(job: Job) -> None:
    """Refuses what every task would fail of, before one is started."""
    if not job.program:
        require_tensorflow()
        return
    for task in job.cluster.tasks:
        if shutil.which(job.program[0], path=job.cluster.role(task).env.get("PATH")) is None:
            raise UsageError(
                f"{task} cannot run {job.program[0]!r}: there is no such program",
                hint="give a program that is on PATH, or its path",
            )


@contextmanager
def _watching(chronicle: Chronicle, *, quiet: bool) -> Iterator[Sequence[Watcher]]:
    if quiet:
        yield ()
    elif console.err.is_terminal and not console.err.is_dumb_terminal:
        with LiveDisplay(console.err, chronicle).on_screen() as display:
            yield (display,)
    else:
        yield (Display(console.err, chronicle),)
