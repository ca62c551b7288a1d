"""`tfdist render`: prints the commands or manifests that `launch` would use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.job import load_job
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, RecipeOption, SetOption, settings
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.registry import launcher_of

EXAMPLES = (
    "tfdist render cluster.yaml",
    "tfdist render cluster.yaml --to compose --output compose.yaml",
    "tfdist render cluster.yaml --to kubernetes | kubectl apply -f -",
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
            help="The run directory as the tasks see it; an address such as s3://bucket/run for Kubernetes.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; by default stdout.")] = None,
) -> None:
    """Print the commands, sbatch script, compose file or Kubernetes manifests that `launch` would use.

    For this machine and for ssh hosts that is one shell command per task. Nothing is started. The output can be
    edited and run without `tfdist launch`.
    """
    job = load_job(cluster, recipe, settings(overrides, to), command, run_dir)
    launcher = launcher_of(job.cluster)
    text = launcher.render(job.preview(launcher))
    if output is None:
        console.write(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {output}: {error.strerror}", code="output-not-writable", hint="choose another file"
        ) from error
