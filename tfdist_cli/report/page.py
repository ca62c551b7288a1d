"""The page: a summary, charts, the time line, resources and tasks of a run, or a comparison of several ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from importlib import resources
from typing import Literal

from tfdist_cli.launch.usage import TaskUsage
from tfdist_cli.report import figures
from tfdist_cli.report.chart import RATE, TIME, Axis, Series, chart
from tfdist_cli.report.comparison import comparison
from tfdist_cli.report.curves import (
    dropped,
    metric_curves,
    metric_names,
    rate_curve,
    staleness,
    usage_series,
    worker_rates,
)
from tfdist_cli.report.data import RunData
from tfdist_cli.report.markup import Markup, join, missing, table, tag
from tfdist_cli.report.summary import settings_table, summary
from tfdist_cli.report.timeline import timeline

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_ICON = "data:,"
_BYTES = Axis("", figures.size, from_zero=True)
_BYTES_PER_SECOND = Axis("", figures.size_rate, from_zero=True)


def page(runs: Sequence[RunData], written: datetime) -> str:
    """Returns the HTML page of one run, or of the comparison of several ones.

    Args:
        runs: the runs.
        written: the time that the page shows as its own.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = one_run(runs[0]) if len(runs) == 1 else comparison(runs)
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · tfdist report"),
        Markup(f'<link rel="icon" href="{_ICON}">'),
        tag("style", Markup(_file("report.css"))),
    )
    foot = tag("footer", f"tfdist report, written {written:%Y-%m-%d %H:%M:%S %Z}".strip())
    main = tag("main", body, foot)
    script = tag("script", Markup(_file("report.js")))
    html = tag("html", tag("head", *head), tag("body", main, script), lang="en")
    text = f"<!DOCTYPE html>\n{html}\n"
    return text.encode("utf-8", "replace").decode("utf-8")  # YAML may contain half of a surrogate pair, UTF-8 may not


def one_run(run: RunData) -> Markup:
    """The content for one run."""
    return join(
        summary(run),
        section("Training", _training(run)),
        section("Speed", _speed(run)),
        section("Time line", timeline(run)),
        section("Resources", _resources(run)),
        section("Tasks", _tasks(run)),
        section("Settings", settings_table(run)),
    )


def section(title: str, *content: str) -> Markup:
    """A part of the page."""
    return tag("section", tag("h2", title), *content)


def _grid(charts: Iterable[Markup], *, wide: bool = False) -> Markup:
    return tag("div", *charts, class_="grid wide" if wide else "grid")


def _training(run: RunData) -> Markup:
    charts = []
    for name in metric_names(run):
        curves = metric_curves(run, name)
        charts.append(
            chart(name, [Series(split, points, index) for index, (split, points) in enumerate(curves.items())])
        )
    if not any(charts):
        return missing("metrics.jsonl has no metrics: the training has not reported a step, or was not a recipe's.")
    lost = f"{run.lost_lines} reports of steps that were taken once more after a restart are in metrics_lost.jsonl."
    return join(_grid(charts), tag("p", lost, class_="note") if run.lost_lines else "")


def _speed(run: RunData) -> Markup:
    total = rate_curve(run)
    if not total:
        return missing("metrics.jsonl has no rates.")
    workers = worker_rates(run)
    charts = [chart("All workers", [Series("steps/s", total)], TIME, RATE)]
    charts += [chart("Each worker", workers, TIME, RATE)] if len(workers) > 1 else []
    late = chart("Staleness, mean", staleness(run), TIME, Axis("updates", from_zero=True))
    none = "" if late else missing("No staleness was recorded: only asynchronous and bounded workers have one.")
    return join(_grid([*charts, late]), none, _worker_table(run))


def _worker_table(run: RunData) -> Markup:
    workers = run.result.get("workers")
    if not isinstance(workers, dict) or not workers:
        return missing("The steps and examples of each worker are known when the training is done.")
    lost = dropped(run)
    rows = []
    for name, each in workers.items():
        known = each if isinstance(each, dict) else {}
        share = known.get("share")
        rows.append(
            [
                name,
                *(figures.plain(known.get(key)) for key in ("steps", "steps_per_second", "examples")),
                f"{share:.1%}" if isinstance(share, float | int) else figures.UNKNOWN,
                figures.plain(lost.get(name)),
            ]
        )
    return table(["worker", "steps", "steps/s", "examples", "share", "gradients dropped"], rows, class_="numbers")


def _resources(run: RunData) -> Markup:
    if not run.usage:
        return missing(
            "resources.jsonl has no measurements: the tasks neither train a recipe nor call tfdist, or ran for a "
            "few seconds only, or an earlier version of tfdist has launched them."
        )
    charts = [
        chart("Processor", usage_series(run, lambda usage: usage.cpu), TIME, Axis("cores", from_zero=True)),
        chart("Memory", usage_series(run, lambda usage: usage.memory), TIME, _BYTES),
        chart("Sent", usage_series(run, lambda usage: usage.sent), TIME, _BYTES_PER_SECOND),
        chart("Received", usage_series(run, lambda usage: usage.received), TIME, _BYTES_PER_SECOND),
    ]
    keys: tuple[Literal["percent"], Literal["memory"]] = ("percent", "memory")
    gpus = sorted({name for usages in run.usage.values() for _, usage in usages for name in usage.gpus})
    for name in gpus[:16]:
        percent, memory = (usage_series(run, partial(_of_gpu, name, key)) for key in keys)
        charts += [
            chart(f"GPU {name}", percent, TIME, Axis("% of the time", from_zero=True)),
            chart(f"GPU {name}, memory", memory, TIME, _BYTES),
        ]
    none = "" if gpus else missing("No GPU was measured: the tasks see none, or NVIDIA's driver cannot be reached.")
    return join(_grid(charts, wide=True), _usage_table(run), none)


def _of_gpu(name: str, key: Literal["percent", "memory"], usage: TaskUsage) -> float | None:
    gpu = usage.gpus.get(name)
    return None if gpu is None else gpu.percent if key == "percent" else gpu.memory


def _usage_table(run: RunData) -> Markup:
    rows = []
    for task in [str(each.task) for each in run.view.tasks]:
        usages = [usage for _, usage in run.usage.get(task, [])]
        cpu = [usage.cpu for usage in usages if usage.cpu is not None]
        memory = [usage.memory for usage in usages if usage.memory is not None]
        sent = [usage.sent for usage in usages if usage.sent is not None]
        received = [usage.received for usage in usages if usage.received is not None]
        rows.append(
            [
                task,
                figures.plain(round(sum(cpu) / len(cpu), 2) if cpu else None),
                figures.plain(round(max(cpu), 2) if cpu else None),
                figures.size(max(memory, default=None)),
                *(figures.size_rate(sum(each) / len(each) if each else None) for each in (sent, received)),
            ]
        )
    head = ["task", "cores, mean", "cores, most", "memory, most", "sent, mean", "received, mean"]
    return table(head, rows, class_="numbers")


def _tasks(run: RunData) -> Markup:
    ended = run.result.get("tasks")
    exits = {each.get("task"): each for each in ended if isinstance(each, dict)} if isinstance(ended, list) else {}
    addresses = {event.task: str(event.line.get("host") or "") for event in run.events if event.kind == "started"}
    rows = []
    for view in run.view.tasks:
        name = str(view.task)
        done = exits.get(name, {})
        code = done.get("code")
        rows.append(
            [
                name,
                tag("span", view.state, class_=f"pill {_colour(view.state)}"),
                figures.UNKNOWN if code is None else str(code),
                figures.time(done.get("seconds")),
                str(max(view.starts - 1, 0)),
                view.cause or addresses.get(name, ""),
            ]
        )
    return table(["task", "state", "exit code", "after", "restarts", "cause"], rows, class_="tasks")


def _colour(state: str) -> str:
    return {"done": "good", "failed": "bad", "lost": "bad", "stopped": "warn", "not started": "calm"}.get(state, "calm")


def _file(name: str) -> str:
    return resources.files("tfdist_cli.report").joinpath(name).read_text(encoding="utf-8")
