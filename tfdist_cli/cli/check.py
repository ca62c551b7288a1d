"""`tfdist check`: builds a recipe's model and takes one step before a cluster starts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tfdist_cli.check.memory import memory_findings, shown, task_facts
from tfdist_cli.check.process import check_program, check_recipe
from tfdist_cli.check.quick import quick_findings
from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.findings import print_findings
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.job import load_job
from tfdist_cli.cli.options import (
    ClusterArgument,
    CommandArgument,
    JsonOption,
    OnOption,
    RecipeOption,
    SetOption,
    settings,
)
from tfdist_cli.errors import ExitCode, UsageError
from tfdist_cli.finding import Finding
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.warnings import warnings_of
from tfdist_cli.protocol.check_report import Report
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

EXAMPLES = (
    "tfdist check cluster.yaml",
    "tfdist check cluster.yaml --recipe recipes/ctr.yaml --set roles.ps.replicas=4 --json",
    "tfdist check cluster.yaml --task worker:1",
    "tfdist check cluster.yaml --quick",
    "tfdist check cluster.yaml -- python train.py",
)


def check(  # noqa: PLR0913 a parameter is an option
    cluster: ClusterArgument,
    command: CommandArgument = None,
    *,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    on: OnOption = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            "-t",
            metavar="ROLE:INDEX",
            help="Check the data of this task only. Repeatable.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only read the files, as `tfdist launch` does; import nothing.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the check is ended.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Build a recipe's model and take one step before a cluster starts, and report problems with their fixes.

    One process on this machine makes the model, draws a batch of each worker's data, and takes one step on its
    processors. The check finds data that all workers would share or that is in batches already, another backend of
    Keras, embedding tables that each step fetches completely, and what the training would refuse. It prints the bytes
    that cross the network in a step, and those that each task stores.

    A program of your own runs in one process without its cluster, with Keras's limits of one epoch of one step. What
    else it does, such as writing files, it does here too.

    `tfdist launch` makes the quick part of these checks itself.

    Exit codes: 0 no errors, 2 the training would fail.
    """
    began = time.monotonic()
    job = load_job(cluster, recipe, settings(overrides, on), command)
    job.check_module()
    tasks = [_task(job.cluster, name) for name in task or ()]
    found = [
        Finding(each.code, "warning", str(cluster), each.message, each.hint)
        for each in warnings_of(job.cluster, Machine.here())
    ]
    found += quick_findings(job.cluster, job.recipe) if job.recipe else []
    report = Report()
    if not quick and not any(finding.level == "error" for finding in found):
        if job.recipe:
            report = check_recipe(job.cluster, job.recipe, tasks, timeout)
        else:
            report = check_program(job.cluster, job.program, timeout)
        found += [*report.findings, *memory_findings(job.cluster, report.facts, Machine.here().memory)]
    found = sorted(_once(found), key=lambda finding: finding.level)
    errors = any(finding.level == "error" for finding in found)
    if as_json:
        seconds = round(time.monotonic() - began, 2)
        findings = [vars(finding) for finding in found]
        text = {"ok": not errors, "seconds": seconds, "facts": dict(report.facts), "findings": findings}
        console.write(json.dumps(text, indent=2))
    else:
        _print_facts(report.facts)
        print_findings([_relative(finding) for finding in found])
    if errors:
        raise typer.Exit(ExitCode.USAGE)


def _task(cluster: Cluster, name: str) -> TaskId:
    try:
        task = TaskId.parse(name)
    except ValueError as error:
        raise UsageError(str(error), code="invalid-task", hint="write it as worker:1") from error
    if task not in cluster.tasks:
        raise UsageError(
            f"the cluster has no task {task}",
            code="no-such-task",
            hint=f"its tasks are {', '.join(map(str, cluster.tasks))}",
        )
    return task


def _once(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yields each problem at a place once: the quick checks and the process may find the same."""
    seen = set()
    for finding in found:
        if (finding.code, finding.place) not in seen:
            seen.add((finding.code, finding.place))
            yield finding


def _relative(finding: Finding) -> Finding:
    """Returns a finding whose place is relative to the current folder, if it is below."""
    folder = f"{Path.cwd()}/"
    return Finding(**{**vars(finding), "place": finding.place.removeprefix(folder)})


def _print_facts(facts: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, text in _lines(facts):
        table.add_row(Text(name, style="bold"), Text(neutral(text)))
    tasks = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("task", "variables", "memory (about)"):
        tasks.add_column(column, justify="left" if column == "task" else "right")
    for task, own in task_facts(facts).items():
        variables = shown(own["variables_bytes"]) if own["variables_bytes"] else ""
        tasks.add_row(str(task), variables, shown(own["memory_bytes"]))
    for each in (table, tasks):
        if each.row_count:
            console.out.print(each)


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, data, network = facts.get("model"), facts.get("data"), facts.get("network")
    if model:
        sizes = f"{shown(model['weights_bytes'])} of weights, {shown(model['slots_bytes'])} of optimizer variables"
        yield "model", f"{model['name']}: {model['parameters']:,} parameters, {sizes} ({model['optimizer']})"
    if data:
        yield "batch", data["batch"]
        shards, steps = facts["shards"]["count"], data["steps_per_epoch"]
        length = "an epoch ends with the data" if steps is None else f"{steps:,} steps an epoch"
        yield "data", f"{shards} shard{'s' * (shards != 1)}, {length}"
        total = [] if data["steps"] is None else [f"{data['steps']:,} steps"]
        yield "training", ", ".join(total + ([f"{data['epochs']} epochs"] if data["epochs"] else []))
    if network and "pulled_bytes" in network:
        most = "at most " if network["at_most"] else ""
        whole = f"pulls {most}{shown(network['pulled_bytes'])} and pushes {most}{shown(network['pushed_bytes'])}"
        tables = network["tables_by_rows"]
        rows = f"; only rows of {tables} table{'s' * (tables != 1)}" if tables else ""
        yield "network", f"a worker's step {whole}{rows}"
    elif network and network["reduced_bytes"]:
        yield "network", f"a step sums {shown(network['reduced_bytes'])} of gradients over all workers"
    if "step" in facts:
        yield "step", f"loss {facts['step']['loss']:.4g}" if facts["step"]["loss"] != "nan" else "loss nan"
