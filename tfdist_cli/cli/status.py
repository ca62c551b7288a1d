"""`tfdist status`: shows the state of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.console.progress import duration, metrics_text, scaled_text
from tfdist_cli.cli.console.usage import usage_cells
from tfdist_cli.cli.list import OUTCOME_COLOURS
from tfdist_cli.cli.options import JsonOption, RunLocation
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.run.history import Outcome, RunView, TaskView, leftover_processes, read_run
from tfdist_cli.launch.run.report import format_replicas
from tfdist_cli.runs.source import open_run

EXAMPLES = (
    "tfdist status",
    "tfdist status runs/digits-20260102-030405 --json",
    "tfdist status s3://bucket/runs/digits",
)


def status(run: RunLocation, as_json: JsonOption = False) -> None:
    """Show a run's tasks, its progress, and why it ended.

    The default run is runs/latest, the last run launched. The command reads only the run directory: it works from any
    terminal, during the run and after it, also when the launcher was killed. A run in a bucket is shown as it was when
    it was uploaded last, a few seconds ago.
    """
    with open_run(run) as source:
        view = read_run(source.path)
    if as_json:
        console.write(to_json(view.as_json(), indent=2))
        return
    manual = ", started by hand" if view.manual else ""
    title = Text.assemble(
        (view.outcome.value, OUTCOME_COLOURS[view.outcome]),
        f" {_doing(view)}{view.strategy}{manual}",
    )
    console.out.print(Text.assemble((neutral(view.path.name), "bold"), ": ", title, f", {duration(view.seconds)}"))
    table = Table.grid(padding=(0, 2))
    for task in view.tasks:
        table.add_row(*_row(task))
    console.out.print(table)
    for name, text in _facts(view):
        console.out.print(Text.assemble((f"{name:<10}", "bold"), neutral(text)), soft_wrap=True)


def _doing(view: RunView) -> str:
    return f"({view.phase}) " if view.outcome is Outcome.RUNNING and not view.manual else ""


def _row(task: TaskView) -> tuple[Text, ...]:
    return (
        Text(str(task.task), style=task.task.traits.colour),
        Text(neutral(task.state)),
        Text(neutral(", ".join(_share(task.resources)))),
        Text(neutral(_process(task)) if task.pid else "" if task.state == "done" else neutral(task.cause)),
        Text(f"started {task.starts} times" if task.starts > 1 else ""),
        *(Text(neutral(cell), justify="right") for cell in usage_cells(task.usage)),
    )


def _process(task: TaskView) -> str:
    return f"pid {task.pid} on {task.host}" if task.host else f"pid {task.pid}"


def _share(resources: Mapping[str, Any]) -> Iterator[str]:
    """Yields the resources of a task."""
    gpus, threads, memory = (resources.get(key) for key in ("gpus", "intra_op_threads", "memory"))
    if isinstance(gpus, list) and gpus:
        yield f"GPU {' '.join(map(str, gpus))}"
    if threads is not None:
        yield "1 thread" if threads == 1 else f"{threads} threads"
    if memory is not None:
        yield str(memory)


def _facts(view: RunView) -> Iterator[tuple[str, str]]:
    if view.step is not None:
        yield "training", f"step {view.step}  {metrics_text(view.metrics)}"
    for each in view.scaled:
        text = scaled_text(each)
        when = f"{format_replicas(each['replicas'])} after {duration(each['seconds'])}"
        yield "scaled", f"{when}; {text}" if text else when
    if view.headline:
        yield "stopped" if view.outcome is Outcome.STOPPED else "error", view.headline
    if view.manual:
        yield "tasks", "each was started by itself with `tfdist role`, without a launcher: its output is where it runs"
    elif view.outcome is Outcome.LOST:
        alive = len(leftover_processes(view))
        yield "launcher", "not running, and left no result" + (f"; {alive} of its tasks still run" if alive else "")
    if view.can_resume:
        yield "resume", f"launch again with --run-dir {view.shown}"
    yield "run", view.shown
