"""`tfdist render`: prints the commands or manifests that `launch` would use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.job import Job, load_job
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, RecipeOption, SetOption, settings
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.registry import launcher_of
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.environment import RUN_URL

EXAMPLES = (
    "tfdist render cluster.yaml",
    "tfdist render cluster.yaml --to compose --output compose.yaml",
    "tfdist render cluster.yaml --to kubernetes | kubectl apply --server-side -f -",
    "tfdist render cluster.yaml --to kubernetes --run-dir s3://bucket/runs/digits --output job.yaml",
)


def render(
    cluster: ClusterArgument,
    command: CommandArgument = None,
    *,
    to: Annotated[
        str | None,
        typer.Option(metavar="LAUNCHER", help="The launcher; by default the cluster's.", show_default=False),
    ] = None,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|URL",
            help="The run directory as the tasks see it, or its address in a bucket, to which the chief uploads it: "
            "s3://bucket/run.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; by default stdout.")] = None,
) -> None:
    """Print the commands, sbatch script, compose file or Kubernetes manifests that `launch` would use.

    Nothing is started. The sbatch script, the compose file and the Kubernetes manifests can be edited, and run without
    `tfdist launch`. For other launchers, such as this machine and ssh hosts, the output shows what `launch` would start
    in each task, and does not run by itself: `launch` first chooses free ports and writes the run directory.
    """
    job = load_job(cluster, recipe, settings(overrides, to), command, run_dir)
    launcher = launcher_of(job.cluster)
    text = launcher.render(_uploading(job.preview(launcher), job))
    if output is None:
        console.write(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {output}: {error.strerror}", code="output-not-writable", hint="choose another file"
        ) from error


def _uploading(plan: Plan, job: Job) -> Plan:
    """Returns the plan of tasks that no launcher follows: the chief uploads a run with an address.

    Raises:
        UsageError: the launcher's tasks need a run directory that they share.
    """
    if job.url is None:
        return plan
    if job.cluster.launcher_traits.shares_run_dir:
        raise UsageError(
            f"the script for {job.cluster.launcher} puts the cluster file and the recipe into the run directory, which "
            f"all nodes share: it cannot be {job.url}",
            code="run-dir-not-shared",
            hint="`tfdist launch --run-dir` takes the address; or write a script with `srun tfdist role --cluster FILE "
            f"--run-dir {job.url}`",
        )
    tasks = tuple(replace(task, env={**task.env, RUN_URL: str(job.url)}) for task in plan.tasks)
    return replace(plan, tasks=tasks)
