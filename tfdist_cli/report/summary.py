"""The head of the page: how a run ended, its result, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist_cli.launch.run.history import Outcome
from tfdist_cli.launch.run.snapshot import numbers
from tfdist_cli.protocol.run_files import number
from tfdist_cli.report import figures
from tfdist_cli.report.data import RunData
from tfdist_cli.report.markup import Markup, join, missing, table, tag

OUTCOME_COLOURS = {
    Outcome.RUNNING: "calm",
    Outcome.DONE: "good",
    Outcome.FAILED: "bad",
    Outcome.STOPPED: "warn",
    Outcome.LOST: "bad",
}
_UNKNOWN = "not recorded"


def summary(run: RunData) -> Markup:
    """The title, the most important figures, and the facts of a run."""
    state = run.view.outcome.value
    title = tag("h1", run.name, " ", tag("span", state, class_=f"pill {OUTCOME_COLOURS[run.view.outcome]}"))
    parts = [title, tag("p", subtitle(run), class_="subtitle")]
    if headline(run):
        parts.append(tag("p", headline(run), class_=headline_class(run)))
    parts += [tag("p", str(text), class_="note") for text in run.result.get("warnings") or ()]
    if run.damaged:
        parts.append(missing(f"These files could not be read: {', '.join(run.damaged)}."))
    if run.view.outcome is Outcome.RUNNING:
        parts.append(tag("p", "The run goes on: this page shows what was written until now.", class_="note"))
    cards = tag("div", *(_card(name, value) for name, value in headline_figures(run)), class_="cards")
    facts = tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in _facts(run)), class_="facts")
    return tag("header", *parts, cards, facts)


def subtitle(run: RunData) -> str:
    """The strategy, and the number of tasks of each role."""
    roles: dict[str, int] = {}
    for task in run.view.tasks:
        roles[task.task.role] = roles.get(task.task.role, 0) + 1
    counts = ", ".join(f"{count} {role}" for role, count in roles.items())
    manual = ", started by hand" if run.view.manual else ""
    return f"{run.view.strategy.replace('_', ' ')}: {counts}{manual}"


def headline(run: RunData) -> str:
    """What ended the run, if its training was not done."""
    if run.view.outcome is Outcome.LOST and not run.view.manual:
        return "The launcher disappeared without a result."
    return run.view.headline


def headline_class(run: RunData) -> str:
    """How it is shown: a run that was stopped has not failed."""
    return "headline warn" if run.view.outcome is Outcome.STOPPED else "headline"


def headline_figures(run: RunData) -> Iterator[tuple[str, str]]:
    """The most important figures of a run."""
    yield "duration", figures.time(run.seconds)
    step = number(run.result.get("step"))
    last = step if step is not None else run.view.step
    if last is not None:
        yield "steps", figures.plain(last)
    if (examples := number(run.result.get("examples"))) is not None:
        yield "examples", figures.plain(examples)
    training = number(run.result.get("training_seconds"))
    first = next((event.line.get("step") for event in run.events if event.kind == "resumed"), 0)
    if training and last and not first:
        yield "steps/s, mean", figures.plain(round(last / training, 1))
    for name, value in final_metrics(run).items():
        yield name, figures.plain(value)


def final_metrics(run: RunData) -> dict[str, float]:
    """The metrics of the result; of a run without one, the last ones in metrics.jsonl."""
    return numbers(run.result.get("metrics")) or dict(run.view.metrics)


def _card(name: str, value: str) -> Markup:
    return tag("div", tag("span", name), tag("strong", value), class_="card")


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    launch = run.last("launch")
    code = run.result.get("exit_code")
    yield "exit code", figures.UNKNOWN if code is None else str(code)
    yield "began", f"{run.view.began:%Y-%m-%d %H:%M:%S} UTC" if run.view.began else _UNKNOWN
    yield "launcher", _launcher(run)
    yield "launches, attempts", f"{sum(event.kind == 'launch' for event in run.events)}, {_attempts(run)}"
    yield "lost tasks", str(sum(event.kind == "loss" for event in run.events))
    yield "commit", commit(run)
    yield "versions", versions(run)
    yield "launcher's host", str(launch.get("host") or _UNKNOWN)
    yield "directory", run.view.shown


def _launcher(run: RunData) -> str:
    return run.settings.get("launcher.kind") or run.settings.get("launcher") or _UNKNOWN


def _attempts(run: RunData) -> str:
    found = {event.line.get("attempt") for event in run.events}
    return str(len(found)) if found else figures.UNKNOWN


def commit(run: RunData) -> str:
    """The commit of the recipe's folder."""
    launch = run.last("launch")
    found = launch.get("commit")
    if not found:
        return "not in a Git repository" if "commit" in launch else _UNKNOWN
    return f"{str(found)[:12]}, with changes" if launch.get("modified") else str(found)[:12]


def versions(run: RunData) -> str:
    """The versions that the tasks run; of a run whose tasks have not told theirs, those of the launcher."""
    names = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "tfdist": "tfdist"}
    lines = [event.line for event in run.events if event.kind == "versions"] or [run.last("launch")]
    parts = []
    for key, name in names.items():
        found = sorted({str(line[key]) for line in lines if line.get(key)})
        parts += [f"{name} {' and '.join(found)}"] if found else []
    return ", ".join(parts) or _UNKNOWN


def settings_table(run: RunData) -> Markup:
    """The keys of both files."""
    if not run.settings:
        return missing("cluster.yaml and recipe.yaml cannot be read.")
    rows = [[tag("code", path), value] for path, value in run.settings.items()]
    return tag("details", tag("summary", f"{len(rows)} keys of cluster and recipe"), table(["key", "value"], rows))
