"""The comparison of several runs: their curves in the same charts, and tables of what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfdist_cli.launch.run.directory import short_names
from tfdist_cli.report import figures
from tfdist_cli.report.chart import COLOURS, RATE, TIME, Series, chart
from tfdist_cli.report.curves import metric_curves, metric_names, rate_curve
from tfdist_cli.report.data import RunData
from tfdist_cli.report.markup import Markup, join, missing, table, tag
from tfdist_cli.report.summary import (
    OUTCOME_COLOURS,
    commit,
    final_metrics,
    headline,
    headline_class,
    subtitle,
    versions,
)

_PLACES = ("run_dir", "hosts", "address", "dir", "recipe", "module_dir")
"""Keys whose values differ between any two runs and tell nothing."""


def comparison(runs: Sequence[RunData]) -> Markup:
    """The content for several runs."""
    names = short_names([run.view.shown for run in runs])
    charts = [_metric_chart(runs, names, metric, split) for metric, split in _metrics(runs)]
    speed = [Series(name, rate_curve(run), index) for index, (name, run) in enumerate(zip(names, runs, strict=True))]
    return join(
        tag("header", tag("h1", f"{len(runs)} runs compared"), _legend(runs, names)),
        tag("section", tag("h2", "Results"), _results(runs, names)),
        tag("section", tag("h2", "Training"), _grid(charts) or missing("No run has metrics.")),
        tag("section", tag("h2", "Speed"), _grid([chart("Steps per second", speed, TIME, RATE)])),
        tag("section", tag("h2", "Differences of settings"), _differences(runs, names)),
    )


def _grid(charts: Sequence[Markup]) -> Markup:
    return tag("div", *charts, class_="grid") if any(charts) else Markup()


def _metrics(runs: Sequence[RunData]) -> Iterator[tuple[str, str]]:
    """Yields each metric with each of its splits."""
    for metric in dict.fromkeys(name for run in runs for name in metric_names(run)):
        for split in dict.fromkeys(split for run in runs for split in metric_curves(run, metric)):
            yield metric, split


def _metric_chart(runs: Sequence[RunData], names: Sequence[str], metric: str, split: str) -> Markup:
    lines = []
    for index, (name, run) in enumerate(zip(names, runs, strict=True)):
        points = metric_curves(run, metric).get(split, [])
        lines.append(Series(name, points, index, dashed=index >= COLOURS))
    return chart(f"{metric}, {split}", lines)


def _legend(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    rows = []
    for index, (name, run) in enumerate(zip(names, runs, strict=True)):
        state = tag("span", run.view.outcome.value, class_=f"pill {OUTCOME_COLOURS[run.view.outcome]}")
        rows.append(tag("li", tag("i", class_=f"s{index % COLOURS}"), tag("b", name), " ", state, " ", subtitle(run)))
        if headline(run):
            rows.append(tag("li", headline(run), class_=headline_class(run)))
    return tag("ul", *rows, class_="runs")


def _results(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    rows = [
        ["tasks", *map(subtitle, runs)],
        ["duration", *(figures.time(run.seconds) for run in runs)],
        ["steps", *(figures.plain(run.view.step) for run in runs)],
        ["lost tasks", *(str(sum(event.kind == "loss" for event in run.events)) for run in runs)],
    ]
    metrics = dict.fromkeys(name for run in runs for name in final_metrics(run))
    rows += [[metric, *(figures.plain(final_metrics(run).get(metric)) for run in runs)] for metric in metrics]
    rows += [["versions", *map(versions, runs)], ["commit", *map(commit, runs)]]
    return table(["", *names], rows)


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        values = [run.settings.get(key) for run in runs]
        if len(set(values)) > 1 and key.rpartition(".")[2] not in _PLACES:
            rows.append([tag("code", key), *(figures.UNKNOWN if value is None else value for value in values)])
    if not rows:
        return missing("The runs have the same settings.")
    return table(["key", *names], rows)
