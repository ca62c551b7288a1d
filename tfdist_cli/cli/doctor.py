"""`tfdist doctor`: finds problems on this machine or on the hosts of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.findings import print_findings
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.options import OnOption, RecipeOption, SetOption, settings
from tfdist_cli.doctor.examine import examine
from tfdist_cli.doctor.findings import as_json, findings_of
from tfdist_cli.doctor.sites import HERE, sites_of
from tfdist_cli.errors import ExitCode, UsageError
from tfdist_cli.finding import Finding
from tfdist_cli.launch.registry import launcher_of
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.warnings import warnings_of
from tfdist_cli.run_storage.recipe import RecipeFetcher
from tfdist_cli.spec.loading.load import load_run

if TYPE_CHECKING:
    from tfdist_cli.doctor.examine import HostResult
    from tfdist_cli.spec.sections.cluster import Cluster

EXAMPLES = (
    "tfdist doctor",
    "tfdist doctor cluster.yaml",
    "tfdist doctor cluster.yaml --quick --json",
)
_FOLDED = ("host", "tasks")
"""Columns that wrap when the terminal is narrow."""


def doctor(
    cluster: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER]", help="The cluster file; by default only this machine is examined.", show_default=False
        ),
    ] = None,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    on: OnOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not import TensorFlow on the hosts, which takes a few seconds each.")
    ] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Find problems that would make a job fail, on this machine or on a cluster's hosts, and suggest fixes.

    The command collects facts of each host: versions of Python, TensorFlow, Keras and tfdist, GPUs, memory, disk space,
    clock, proxies. Each host listens on its tasks' ports for a moment while all others connect. Hosts are reached by
    ssh. They need Python, but not tfdist. No file is left there.

    Exit codes: 0 no errors, 1 the job would fail, 2 a file is invalid.
    """
    runs, extra = str(Path.cwd() / "runs"), list[Finding]()
    spec, sites = None, sites_of(None, None, runs)
    if cluster is not None:
        spec, trained = load_run(cluster, recipe, settings(overrides, on), fetch=RecipeFetcher())
        sites, extra = sites_of(spec, trained, runs), list(_findings_before_start(spec))
    names = sorted({address.host for site in sites for address in site.ports.values() if address.host})
    seen = asyncio.run(examine(sites, names, imports=not quick))
    found = sorted([*extra, *findings_of(seen, spec)], key=lambda finding: finding.level)
    if as_json_:
        console.write(json.dumps(as_json(seen, found), indent=2))
    else:
        _print(seen, found)
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(ExitCode.FAILED)


def _findings_before_start(cluster: Cluster) -> Iterator[Finding]:
    """Yields the findings that need no examination of hosts."""
    for warning in warnings_of(cluster, Machine.here()):
        yield Finding(warning.code, "warning", HERE, warning.message, warning.hint)
    if not cluster.launcher_traits.local_processes:  # local launchers need nothing beyond the facts of this machine
        try:
            launcher_of(cluster).check(cluster, ())
        except UsageError as error:
            yield Finding(error.code or "launcher", "error", HERE, error.message, error.hint or "")


def _print(seen: Sequence[HostResult], found: Sequence[Finding]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("host", "tasks", "Python", "TensorFlow", "Keras", "tfdist", "GPUs", "free memory", "clock"):
        table.add_column(column, overflow="fold", no_wrap=column not in _FOLDED)
    for one in seen:
        table.add_row(*map(Text, _row(one)))
    console.out.print(table)
    print_findings(found)


def _row(one: HostResult) -> tuple[str, ...]:
    name, tasks = neutral(one.site.name), ", ".join(map(str, one.site.tasks)) or "none"
    if one.no_answer:
        return (name, tasks, "no answer", *[""] * 6)
    facts = one.facts
    versions = {**facts["versions"], **{key: text for key, text in (facts["imported"] or {}).items() if key != "error"}}
    free, total = facts["memory"]["available"], facts["memory"]["total"]
    shown = (str(versions[key] or "none") for key in ("tensorflow", "keras", "tfdist"))
    return (
        name,
        tasks,
        facts["python"],
        *map(neutral, shown),
        str(len(facts["gpus"])),
        f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB" if total else "?",
        f"{round(one.clock[0], 2) + 0.0:+.2f} s",
    )
