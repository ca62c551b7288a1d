"""`tfdist launch`: starts all tasks of a cluster and supervises them until the training ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.check.quick import quick_findings
from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.progress import Display, LiveDisplay
from tfdist_cli.cli.console.summary import print_failure, print_report
from tfdist_cli.cli.job import Job, load_job
from tfdist_cli.cli.options import (
    ClusterArgument,
    CommandArgument,
    OnOption,
    RecipeOption,
    SetOption,
    seconds_option,
    settings,
)
from tfdist_cli.cli.plan import print_plan, print_plan_as_json
from tfdist_cli.errors import ExitCode
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.registry import launcher_of
from tfdist_cli.launch.run.directory import RunDir, open_run_dir
from tfdist_cli.launch.run.event_loop import Watcher
from tfdist_cli.launch.run.planner import Planner, RequestHandler
from tfdist_cli.launch.run.report import Report
from tfdist_cli.launch.run.secrets import Secrets
from tfdist_cli.launch.run.session import Launch
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import RECIPE_FILE
from tfdist_cli.plan.warnings import recipe_warnings, warnings_of
from tfdist_cli.requirements import require_trackers
from tfdist_cli.run_storage.stored_run import StoredRun, UploadProcess

EXAMPLES = (
    "tfdist launch configs/local.yaml",
    "tfdist launch cluster.yaml --recipe recipe.yaml --set train.epochs=3 --set roles.worker.replicas=4",
    "tfdist launch configs/local.yaml --track tensorboard --track csv",
    "tfdist launch cluster.yaml --run-dir s3://bucket/runs/digits",
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
        str | None,
        typer.Option(
            metavar="PATH|URL",
            help="The run directory, also in a bucket: s3://bucket/run. An existing one continues that run; by "
            "default a new one below runs/.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what would be started; start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print neither the tasks' output nor progress.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result of the run, or the plan of a dry run, as JSON.")
    ] = False,
    start_timeout: Annotated[
        float, seconds_option("Seconds within which every task of a recipe must be up.")
    ] = _DEFAULTS.start,
    evaluator_timeout: Annotated[
        float, seconds_option("Seconds for the evaluator to score the last checkpoint after the training.")
    ] = _DEFAULTS.evaluator,
    shutdown_timeout: Annotated[
        float, seconds_option("Seconds between SIGTERM and SIGKILL when a task is stopped.")
    ] = _DEFAULTS.shutdown,
    stall_timeout: Annotated[
        float | None,
        seconds_option(
            "Seconds without a training step, or without a heartbeat of a task, after which the job counts as "
            "stalled; 0 for no limit. Default: 600 for a recipe, 0 for a program.",
            show_default=False,
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Keep the run's metrics in another program, too: tensorboard, mlflow, wandb or csv. Adds to the "
            "recipe's 'tracking'. Repeatable.",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Maximum number of restarts. Default: 3 for a recipe with checkpoints, otherwise 0.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a cluster and train a recipe, or run your own program in each task.

    Each task gets a TF_CONFIG, its share of the machine, and log files in the run directory. A failed task is
    restarted, alone or with all others from the last checkpoint, up to --max-restarts times. If a failure ends the
    job, the report shows its cause and the last lines of the task's log. Ctrl-C: the training saves a checkpoint and
    exits. A second Ctrl-C kills all tasks.

    Exit codes: 0 success, 2 wrong usage or configuration, 124 timeout or stall, 130 Ctrl-C, 143 SIGTERM; otherwise the
    exit code of the task that failed first, 128 + n if signal n killed it.
    """
    job = load_job(cluster, recipe, settings(overrides, on), command, run_dir)
    launcher = launcher_of(job.cluster)
    console.print_warnings(warnings_of(job.cluster, Machine.here()))
    if job.run_dir and not job.url:
        console.print_warnings(recipe_warnings(job.run_dir / RECIPE_FILE, job.recipe))
    trackers = tuple(dict.fromkeys((*(job.recipe.tracking if job.recipe else ()), *(track or ()))))
    require_trackers(trackers)
    job.check_module()
    if dry_run:
        job.check_run_dir()
        _print_preview(job, launcher, as_json=as_json)
        return
    _check_quickly(job)
    launcher.check(job.cluster, job.program)
    stall = (0.0 if job.program else STALL_TIMEOUT) if stall_timeout is None else stall_timeout
    timeouts = Timeouts(start_timeout, evaluator_timeout, shutdown_timeout, stall)
    rules = job.rules(timeouts, max_restarts)
    report, path = launch_job(launcher, job, rules, quiet=quiet, trackers=trackers)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job has ended: a late Ctrl-C must not change the exit code
    with console.tolerating_closed_output():
        print_failure(report)
        if as_json:
            console.write(to_json(report.as_json() | {"run_dir": str(path)}, indent=2))
        else:
            print_report(report, job.url or path)
    raise typer.Exit(report.exit_code)


def _print_preview(job: Job, launcher: Launcher, *, as_json: bool) -> None:
    """Prints the plan and what would be started; as JSON, the plan has both."""
    preview = job.preview(launcher)
    if as_json:
        print_plan_as_json(preview)
        return
    print_plan(preview)
    console.write(launcher.render(preview))


def _check_quickly(job: Job) -> None:
    """Prints what the source of the recipe's module shows, and ends the command if the training would fail.

    Raises:
        typer.Exit: there is an error.
    """
    if job.recipe is None:
        return
    found = quick_findings(job.cluster, job.recipe)
    console.print_findings_before_start(found)
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(ExitCode.USAGE)


def launch_job(
    launcher: Launcher, job: Job, rules: JobPolicy, *, quiet: bool, trackers: Sequence[str] = ()
) -> tuple[Report, Path]:
    """Runs a job until it ends.

    Returns:
        The report, and the run directory.
    """
    now = datetime.now().astimezone()
    secrets = Secrets.read(job.cluster)
    with ExitStack() as stack:
        with console.launcher_messages(quiet=quiet):
            planner = stack.enter_context(Planner(launcher, job.cluster, job.recipe, job.program).reserving())
        stored = _prepare(job)
        with stored.given_back_on_error() if stored else nullcontext():
            opened = stack.enter_context(
                open_run_dir(job.run_dir, job.parent, job.cluster.name, now, job.refuse_run_dir)
            )
        upload = stack.enter_context(stored.uploading(opened.path)) if stored else None
        handler = RequestHandler(planner, opened)
        planned = Launch(launcher, planner.plan(opened), opened, rules, secrets, handler, trackers)
        snapshot = RunSnapshot()
        with _watchers(snapshot, quiet=quiet) as watchers:
            report = planned.run(snapshot, watchers)
        return (_complete(upload, report, opened, quiet=quiet) if upload else report), opened.path


def _prepare(job: Job) -> StoredRun | None:
    """Takes a run directory in a storage service for this launch, and downloads it if it is not here."""
    if job.url is None or job.run_dir is None:
        return None
    stored = StoredRun.prepare(job.url, job.run_dir, job.recipe)
    console.print_warnings(recipe_warnings(job.run_dir / RECIPE_FILE, job.recipe))
    return stored


def _complete(upload: UploadProcess, report: Report, opened: RunDir, *, quiet: bool) -> Report:
    """Uploads the rest of the run directory."""
    if not quiet:
        console.err.print(f"uploading the run to {upload.url}", markup=False, soft_wrap=True)
    problem = upload.finish(report.exit_code)
    if problem:
        again = f"the run is in {opened.path}: launch again with the same --run-dir to upload it"
        report = report.not_uploaded(f"the run is not complete in {upload.url}: {problem}; {again}")
        with suppress(OSError):  # the problem is printed
            opened.save_result(report.as_json())
    return report


@contextmanager
def _watchers(snapshot: RunSnapshot, *, quiet: bool) -> Iterator[Sequence[Watcher]]:
    if quiet:
        yield ()
        return
    with console.nonblocking_stderr() as err:
        if err.is_terminal and not err.is_dumb_terminal:
            with LiveDisplay(err, snapshot).on_screen() as display:
                yield (display,)
        else:
            yield (Display(err, snapshot),)
