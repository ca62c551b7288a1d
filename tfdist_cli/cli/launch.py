"""`tfdist launch`: every task of a cluster, to the end of the training."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.progress import Display, LiveDisplay
from tfdist_cli.cli.console.summary import print_failure, print_report
from tfdist_cli.cli.job import Job, load_job
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, OnOption, RecipeOption, SetOption, settings
from tfdist_cli.cli.plan import print_plan
from tfdist_cli.launch.registry import launcher_of
from tfdist_cli.launch.run.directory import open_run_dir
from tfdist_cli.launch.run.documents import to_json
from tfdist_cli.launch.run.event_loop import Watcher
from tfdist_cli.launch.run.planner import Planner, RequestHandler
from tfdist_cli.launch.run.report import Report
from tfdist_cli.launch.run.secrets import Secrets
from tfdist_cli.launch.run.session import Launch
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.slurm.launcher import refuse_running_job
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import RECIPE_FILE
from tfdist_cli.plan.warnings import recipe_warnings, warnings_of

EXAMPLES = (
    "tfdist launch configs/local.yaml",
    "tfdist launch cluster.yaml --recipe recipe.yaml --set train.epochs=3 --set roles.worker.replicas=4",
    "tfdist launch cluster.yaml -- python train.py --lr 0.1",
)
STALL_TIMEOUT = 600.0
_DEFAULTS = Timeouts()


def launch(  # noqa: PLR0913 a parameter is an option
    cluster: ClusterArgument,
    command: CommandArgument = None,
    *,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    on: OnOption = None,
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
    """Start a cluster and train a recipe, or run your own program in each task.

    Each task has its TF_CONFIG, its share of the machine and a log in the run's directory. A lost task is started
    again, alone or with all the others from the last checkpoint, up to --max-restarts times. A failure that ends the
    job is told with the last lines of its log. Ctrl-C lets the training save a checkpoint and end; a second one
    kills it.

    Exit codes: 0 done, 2 bad usage or configuration, 124 a timeout or a stall, 130 Ctrl-C, 143 SIGTERM, otherwise the
    code of the task that failed first, 128 + n if signal n killed it.
    """
    job = load_job(cluster, recipe, settings(overrides, on), command, run_dir)
    launcher = launcher_of(job.cluster)
    console.print_warnings(warnings_of(job.cluster, Machine.here()))
    if run_dir:
        console.print_warnings(recipe_warnings(run_dir / RECIPE_FILE, job.recipe))
    if dry_run:
        made = job.foreseen(launcher)
        print_plan(made)
        console.write(launcher.render(made))
        return
    job.check_module()
    launcher.check(job.cluster, job.program)
    stall = (0.0 if job.program else STALL_TIMEOUT) if stall_timeout is None else stall_timeout
    timeouts = Timeouts(start_timeout, evaluator_timeout, shutdown_timeout, stall)
    rules = job.rules(timeouts, max_restarts)
    report, path = carry_out(launcher, job, rules, quiet=quiet)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over; a late Ctrl-C must not change the exit code
    with console.while_somebody_is_there():
        print_failure(report)
        if as_json:
            console.write(to_json(report.as_json() | {"run_dir": str(path)}, indent=2))
        else:
            print_report(report, path)
    raise typer.Exit(report.exit_code)


def carry_out(launcher: Launcher, job: Job, rules: JobPolicy, *, quiet: bool) -> tuple[Report, Path]:
    """Runs a job to its end.

    Returns:
        What came of it, and the run's directory.
    """
    now = datetime.now().astimezone()
    secrets = Secrets.read(job.cluster)
    with ExitStack() as held:
        with console.telling(quiet=quiet):
            planner = held.enter_context(Planner(launcher, job.cluster, job.recipe, job.program).reserving())
        opened = held.enter_context(open_run_dir(job.run_dir, job.parent, job.cluster.name, now, refuse_running_job))
        planned = Launch(launcher, planner.plan(opened), opened, rules, secrets, RequestHandler(planner, opened))
        snapshot = RunSnapshot()
        with _watching(snapshot, quiet=quiet) as watchers:
            return planned.run(snapshot, watchers), opened.path


@contextmanager
def _watching(snapshot: RunSnapshot, *, quiet: bool) -> Iterator[Sequence[Watcher]]:
    if quiet:
        yield ()
        return
    with console.err_that_never_waits() as err:
        if err.is_terminal and not err.is_dumb_terminal:
            with LiveDisplay(err, snapshot).on_screen() as display:
                yield (display,)
        else:
            yield (Display(err, snapshot),)
