"""`tfdist render`: what `launch` would do, in the words of the program that does it."""

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
        typer.Option(metavar="LAUNCHER", help="For which launcher; by default the cluster's own.", show_default=False),
    ] = None,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The run's directory, as the tasks are to know it.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file to write to, in place of the terminal.")
    ] = None,
) -> None:
    """Print exactly what `launch` would do, in the words of the program that does it.

    For this machine that is a shell command for each task, for containers a compose file, for
    Kubernetes manifests. Nothing is started. What is printed can be kept, read, changed and run without tfdist.
    """
    job = load_job(cluster, recipe, settings(overrides, to), command, run_dir)
    launcher = launcher_of(job.cluster)
    text = launcher.render(job.foreseen(launcher))
    if output is None:
        console.write(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}", hint="name another file") from error
