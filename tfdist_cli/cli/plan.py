"""`tfdist plan`: what `launch` would do, without doing it."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tfdist_cli.cli import console
from tfdist_cli.cli.job import Job
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, OnOption, RecipeOption, SetOption, settings
from tfdist_cli.launch.launchers import launcher_of
from tfdist_cli.plan import Plan, PlannedTask
from tfdist_cli.spec.load import load_run

EXAMPLES = (
    "tfdist plan cluster.yaml",
    "tfdist plan cluster.yaml --set roles.worker.replicas=4 --json",
    "tfdist plan cluster.yaml -- python train.py",
)


def plan(
    cluster: ClusterArgument,
    command: CommandArgument = None,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    on: OnOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of the plan, with environments, as JSON.")] = False,
) -> None:
    """Show what `launch` would start: every task with its address, resources and command.

    A task without hosts gets a free port of this machine when it starts; the plan has port 0 for it.
    """
    spec, trained = load_run(cluster, recipe, settings(overrides, on))
    job = Job(spec, None if command else trained, tuple(command or ()), None)
    made = job.foreseen(launcher_of(spec))
    if as_json:
        console.write(json.dumps(made.as_json(), indent=2))
    else:
        print_plan(made)


def print_plan(made: Plan) -> None:
    """Prints a table of what each task runs, where, and with what share of the machine."""
    title = f"{made.name}: {made.strategy}, in {made.run_dir}"
    table = Table(title=escape(title), title_justify="left")
    for column in ("task", "address", "threads", "GPUs", "command"):
        table.add_column(column, overflow="fold")
    for task in made.tasks:
        table.add_row(*(escape(cell) for cell in _row(task)))
    console.out.print(table)


def _row(planned: PlannedTask) -> tuple[str, ...]:
    address = planned.address
    return (
        str(planned.task),
        str(address) if address.port else f"{address.host} (free port)",
        str(planned.resources.intra_op_threads),
        ", ".join(planned.resources.gpus) or "none",
        shlex.join(planned.argv),
    )
