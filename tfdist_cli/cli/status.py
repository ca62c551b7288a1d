"""`tfdist status`: how a run stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.console.progress import duration, metrics_text
from tfdist_cli.cli.list import OUTCOME_COLOURS
from tfdist_cli.cli.options import JsonOption, RunArgument
from tfdist_cli.launch.run.documents import to_json
from tfdist_cli.launch.run.history import Outcome, RunView, TaskView, leftover_processes, read_run
from tfdist_cli.launch.run.report import format_replicas

EXAMPLES = ("tfdist status", "tfdist status runs/digits-20260102-030405 --json")


def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show how a run stands: its tasks, its progress, and what ended it.

    By default it is runs/latest, the run below runs/ that was launched last. It reads the run's directory and nothing
    else, so it works from any terminal, during the run and after it, and when the launcher is gone.
    """
    news = read_run(run)
    if as_json:
        console.write(to_json(news.as_json(), indent=2))
        return
    title = Text.assemble((news.outcome.value, OUTCOME_COLOURS[news.outcome]), f" {_doing(news)}{news.strategy}")
    console.out.print(Text.assemble((neutral(news.path.name), "bold"), ": ", title, f", {duration(news.seconds)}"))
    table = Table.grid(padding=(0, 2))
    for task in news.tasks:
        table.add_row(*_row(task))
    console.out.print(table)
    for name, text in _facts(news):
        console.out.print(Text.assemble((f"{name:<10}", "bold"), neutral(text)), soft_wrap=True)


def _doing(news: RunView) -> str:
    return f"({news.phase}) " if news.outcome is Outcome.RUNNING else ""


def _since(scaled: Mapping[str, Any]) -> str:
    """From where the training went on with other numbers of tasks, if it has."""
    if scaled["took"] is None:
        return ""
    where = "from the beginning" if scaled["resumed"] is None else f"from step {scaled['resumed']}"
    return f"; it went on {where}, {duration(scaled['took'])} later"


def _row(task: TaskView) -> tuple[Text, ...]:
    return (
        Text(str(task.task), style=task.task.traits.colour),
        Text(neutral(task.state)),
        Text(neutral(", ".join(_share(task.resources)))),
        Text(f"pid {task.pid}" if task.pid else "" if task.state == "done" else neutral(task.cause)),
        Text(f"started {task.starts} times" if task.starts > 1 else ""),
    )


def _share(resources: Mapping[str, Any]) -> Iterator[str]:
    """What a task was given of its machine."""
    gpus, threads, memory = (resources.get(key) for key in ("gpus", "intra_op_threads", "memory"))
    if isinstance(gpus, list) and gpus:
        yield f"GPU {' '.join(map(str, gpus))}"
    if threads is not None:
        yield "1 thread" if threads == 1 else f"{threads} threads"
    if memory is not None:
        yield str(memory)


def _facts(news: RunView) -> Iterator[tuple[str, str]]:
    if news.step is not None:
        yield "training", f"step {news.step}  {metrics_text(news.metrics)}"
    for each in news.scaled:
        yield "scaled", f"{format_replicas(each['replicas'])} after {duration(each['seconds'])}{_since(each)}"
    if news.headline:
        yield "stopped" if news.outcome is Outcome.STOPPED else "error", news.headline
    if news.outcome is Outcome.LOST:
        alive = len(leftover_processes(news))
        yield "launcher", "gone, without a word" + (f"; {alive} of its tasks are still there" if alive else "")
    if news.can_resume:
        yield "to go on", f"launch again with --run-dir {news.path}"
    yield "run", str(news.path)
