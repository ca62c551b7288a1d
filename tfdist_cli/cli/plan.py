"""`tfdist plan`: what `launch` would do, without doing it."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tfdist_cli.cautions import cautions
from tfdist_cli.cli import console
from tfdist_cli.cli.job import Job
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, OnOption, RecipeOption, SetOption, settings
from tfdist_cli.launch.launchers import launcher_of
from tfdist_cli.plan import Plan, PlannedTask
from tfdist_cli.resources import Machine, Resources
from tfdist_cli.spec.load import load_run

EXAMPLES = (
    "tfdist plan cluster.yaml",
    "tfdist plan cluster.yaml --set roles.worker.replicas=4 --json",
    "tfdist plan cluster.yaml -- python train.py",
)


_COLUMNS = ("task", "address", "threads", "memory", "GPUs", "command")
"""Those in which no task has anything are left out."""


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
    console.print_cautions(cautions(spec, Machine.here()))
    if as_json:
        console.write(json.dumps(made.as_json(), indent=2))
    else:
        print_plan(made)


def print_plan(made: Plan) -> None:
    """Prints a table of what each task runs, where, and with what share of the machine."""
    title = f"{made.name}: {made.strategy}, in {made.run_dir}"
    table = Table(title=escape(title), title_justify="left")
    rows = [_row(task) for task in made.tasks]
    for column in (name for name in _COLUMNS if any(row.get(name) for row in rows)):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[str(column.header)]) for column in table.columns))
    console.out.print(table)


def _row(planned: PlannedTask) -> dict[str, str]:
    address, resources = planned.address, planned.resources
    return {
        "task": str(planned.task),
        "address": str(address) if address.port else f"{address.host} (free port)",
        "threads": str(resources.intra_op_threads or "its cores"),
        "memory": str(resources.memory or ""),
        "GPUs": _gpus(resources),
        "command": shlex.join(planned.argv),
    }


def _gpus(resources: Resources) -> str:
    seen = ", ".join(resources.gpus) or "none"
    taken = resources.gpu_memory
    if taken is None or not resources.gpus:
        return seen
    return f"{seen} ({f'{taken:.0%}' if isinstance(taken, float) else taken})"
