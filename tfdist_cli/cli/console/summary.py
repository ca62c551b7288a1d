"""The final output of a launch: the failure on stderr, headline first; the report on stdout."""

from __future__ import annotations

from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.cli.console.progress import duration, metrics_text, scaled_text
from tfdist_cli.errors import label
from tfdist_cli.launch.run.report import cause_of, format_replicas, resize_as_json
from tfdist_cli.launch.run.snapshot import numbers
from tfdist_cli.spec.roles import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tfdist_cli.launch.run.report import Failure, Report, TaskExit
    from tfdist_cli.launch.run.snapshot import WorkerFigures
    from tfdist_cli.launch.supervisor.state import Resize
    from tfdist_cli.spec.path_scheme import Location

_CONSEQUENCES = 10
"""Maximum number of further failures to print; result.json has all of them."""
_LINE_LENGTH = 100
"""Maximum number of characters of such a task's last line."""
_WORKERS = 8
"""Maximum number of workers to print one by one; result.json has all of them."""


def print_failure(report: Report) -> None:
    """Prints lost tasks and resizes, then the failure that ended the job and its consequences, on stderr."""
    for loss in report.lost_tasks:
        again = "restarted" if loss.alone else "all tasks restarted from the last checkpoint"
        when = f"after {loss.ended.failed_at:.1f} s" + (f", at step {loss.step}" if loss.step else "")
        _print_labelled("lost:", f"{loss.task} {when}, {cause_of(loss)}; {again}")
    for resize in report.resizes:
        _print_labelled("scaled:", _resize_text(resize))
    if report.headline:
        _print_labelled(f"{label(report.code)}:", report.headline)
    if report.failures:
        _print_details(report.failures[0])
        if report.failures[0].not_restarted_because:
            _print_labelled("note:", report.failures[0].not_restarted_because)
    after = report.failures[1:]
    for failure in after[:_CONSEQUENCES]:
        _print_labelled("then:", failure.summary.partition("\n")[0] + _last_line(failure))
    if len(after) > _CONSEQUENCES:
        _print_labelled("then:", f"{len(after) - _CONSEQUENCES} more tasks failed")
    for warning in report.warnings:
        _print_labelled("warning:", warning)


def print_report(report: Report, run_dir: Location) -> None:
    """Prints the result of the run on stdout."""
    table = Table.grid(padding=(0, 2))
    for row in _task_rows(report):
        table.add_row(*row)
    console.out.print(table)
    for name, text in _facts(report, run_dir):
        console.out.print(Text.assemble((f"{name:<12}", "bold"), neutral(text)), soft_wrap=True)


def _worker_lines(report: Report) -> Iterator[str]:
    """Yields what each of several workers did; of many workers only the ranges."""
    workers = report.workers
    if len(workers) < 2:
        return
    if len(workers) <= _WORKERS:
        width = max(map(len, workers))
        for name, figures in workers.items():
            yield f"{name:<{width}}  {_worker_text([figures], [report.share(name)])}"
    else:
        yield f"{len(workers)}, each {_worker_text([*workers.values()], [report.share(name) for name in workers])}"


def _worker_text(workers: Sequence[WorkerFigures], shares: Sequence[float]) -> str:
    """Returns `1,200 steps, 61.2 steps/s, 67% of the examples`, each a range if there are several workers."""
    rates = [each.steps_per_second for each in workers if each.steps_per_second is not None]
    parts = [f"{_range([each.steps for each in workers], ',')} steps"]
    parts += [f"{_range(rates, ',.1f')} steps/s"] if rates else []
    return ", ".join([*parts, f"{_range(shares, '.0%')} of the examples"])


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _print_details(failure: Failure) -> None:
    if failure.hint:
        _print_labelled("hint:", failure.hint)
    # An error with a hint needs no more details. Otherwise print its traceback, or else the last lines.
    lines = failure.traceback.splitlines() if failure.traceback else [] if failure.message else failure.last_lines
    for line in lines:
        console.err.print(Text(f"  {neutral(line)}"), soft_wrap=True)
    _print_labelled("log:", str(failure.log))


def _resize_text(resize: Resize) -> str:
    """Describes when the number of tasks changed, and at which step the training continued."""
    when = f"{format_replicas(resize.wanted.replicas)} after {resize.asked_at:.1f} s"
    return f"{when}; {scaled_text(resize_as_json(resize)) or 'no step after that'}"


def _last_line(failure: Failure) -> str:
    """Returns the last line that a task printed, which is its error rather than the hint after it."""
    lines = [line for line in failure.last_lines if not line.startswith("hint: ")]
    if failure.message or not lines or failure.reason.startswith("killed"):
        return ""
    return f': "{lines[-1][:_LINE_LENGTH]}"'


def _print_labelled(what: str, text: str) -> None:
    prefix = (what, "bold red" if what.startswith("error") else "bold")
    lines = "\n".join(neutral(line) for line in text.splitlines())
    console.err.print(Text.assemble(prefix, " ", lines), soft_wrap=True)


def _task_rows(report: Report) -> Iterator[tuple[Text, ...]]:
    """Yields one row per task; tasks of one role that ended the same way share a row."""
    for (role, what, restarts), alike in groupby(
        report.tasks, key=lambda end: (end.task.role, end.reason, end.restarts)
    ):
        ends = list(alike)
        seconds = [end.seconds for end in ends if end.seconds is not None]
        yield (
            Text(_names(ends), style=ROLES[role].colour),
            Text(("done" if what == "exit code 0" else what) + (f", started {restarts + 1} times" if restarts else "")),
            Text(duration(max(seconds)) if seconds else ""),
        )


def _names(ends: list[TaskExit]) -> str:
    first, last = ends[0].task, ends[-1].task
    return str(first) if len(ends) == 1 else f"{first}-{last.index}"


def _facts(report: Report, run_dir: Location) -> Iterator[tuple[str, str]]:
    result = report.result
    if result:
        step, examples, seconds = (result.get(key) for key in ("step", "examples", "seconds"))
        begun = f"from step {result['first']} " if result.get("first") else ""
        yield "training", f"{begun}to step {step}, {examples} examples in {seconds} s"
    elif report.last_step is not None:
        yield "training", f"to step {report.last_step}"
    yield from zip(chain(["workers"], repeat("")), _worker_lines(report), strict=False)
    if report.metrics:
        yield "metrics", metrics_text(report.metrics)
    if report.evaluation:
        scores = metrics_text(numbers(report.evaluation.get("metrics")))
        yield "evaluation", f"{scores}  at step {report.evaluation.get('step')}"
    if report.checkpoints:
        path, saved = list(report.checkpoints.items())[-1]
        yield "checkpoint", f"{path}  at step {saved}"
    for path in report.exports:
        yield "export", path
    yield "run", str(run_dir)
    if report.exit_code and report.checkpoints:
        yield "resume", f"launch again with --run-dir {run_dir}"
    yield "time", duration(report.seconds)
