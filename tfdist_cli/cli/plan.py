"""`tfdist plan`: prints the plan of a launch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from tfdist_cli.cli.console import console
from tfdist_cli.cli.job import Job
from tfdist_cli.cli.options import ClusterArgument, CommandArgument, OnOption, RecipeOption, SetOption, settings
from tfdist_cli.launch.registry import launcher_of
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, PlannedTask
from tfdist_cli.plan.resources import Resources
from tfdist_cli.plan.warnings import warnings_of
from tfdist_cli.run_storage.recipe import RecipeFetcher
from tfdist_cli.spec.loading.load import load_run

EXAMPLES = (
    "tfdist plan cluster.yaml",
    "tfdist plan cluster.yaml --set roles.worker.replicas=4 --json",
    "tfdist plan cluster.yaml -- python train.py",
)


_COLUMNS = ("task", "address", "threads", "cores", "memory", "GPUs")
"""Columns of the table. Empty columns are omitted."""
_FOLDED = ("address", "cores", "GPUs")
"""Columns that wrap when the terminal is narrow."""
_ANY = "ROLE:INDEX"


def plan(
    cluster: ClusterArgument,
    command: CommandArgument = None,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    on: OnOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole plan as JSON, environments included.")
    ] = False,
) -> None:
    """Show what `launch` would start: every task with its address, resources and command.

    A task without hosts gets a free port of this machine at the start. The plan shows port 0 for it.
    """
    spec, trained = load_run(cluster, recipe, settings(overrides, on), fetch=RecipeFetcher())
    job = Job(spec, None if command else trained, tuple(command or ()), None)
    preview = job.preview(launcher_of(spec))
    console.print_warnings(warnings_of(spec, Machine.here()))
    if as_json:
        print_plan_as_json(preview)
    else:
        print_plan(preview)


def print_plan_as_json(plan: Plan) -> None:
    """Prints the whole plan as JSON."""
    console.write(json.dumps(plan.as_json(), indent=2))


def print_plan(plan: Plan) -> None:
    """Prints a table of the tasks with their addresses and resources, then their commands."""
    console.out.print(f"{plan.name}: {plan.strategy}, in {plan.run_dir}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    rows = [_row(task) for task in plan.tasks]
    for column in (name for name in _COLUMNS if any(row.get(name) for row in rows)):
        table.add_column(column, overflow="fold", no_wrap=column not in _FOLDED)
    for row in rows:
        table.add_row(*(escape(row[str(column.header)]) for column in table.columns))
    console.out.print(table)
    for task, command in _commands(plan.tasks):
        console.out.print(f"\n{task} runs\n  {command}", markup=False)


def _commands(tasks: Sequence[PlannedTask]) -> Iterator[tuple[str, str]]:
    """Yields tasks and their commands: one entry if the commands differ only in the task's name."""
    commands = {str(each.task): shlex.join(each.argv) for each in tasks}
    alike = {command.replace(task, _ANY) for task, command in commands.items()}
    yield from [("each task", alike.pop())] if len(alike) == 1 else commands.items()


def _row(planned: PlannedTask) -> dict[str, str]:
    address, resources = planned.address, planned.resources
    return {
        "task": str(planned.task),
        "address": str(address) if address.port else f"{address.host} (free port)",
        "threads": str(resources.intra_op_threads or "its cores"),
        "cores": _cores(resources.cores),
        "memory": str(resources.memory or ""),
        "GPUs": _gpus(resources),
    }


def _cores(cores: Sequence[int]) -> str:
    """The IDs of cores as ranges, such as `0-3,8-11`: the notation of taskset."""
    numbered = sorted(cores)
    runs = (list(run) for _, run in groupby(numbered, key=lambda core: core - numbered.index(core)))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gpus(resources: Resources) -> str:
    seen = " ".join(resources.gpus) or "none"
    taken = resources.gpu_memory
    if taken is None or not resources.gpus:
        return seen
    return f"{seen} ({f'{taken:.0%}' if isinstance(taken, float) else taken})"
