"""The time line of a run: what each task did, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfdist_cli.launch.run.report import format_replicas
from tfdist_cli.report import figures
from tfdist_cli.report.data import Happened, RunData
from tfdist_cli.report.markup import Markup, join, missing, table, tag

MOST_ROWS = 60
"""Tasks that are drawn; of more, those to which something happened come first."""
MOST_EVENTS = 500
"""Events in the list; of more, the first and the last ones."""
_STATES = ("starting", "waiting", "serving", "counting", "training", "evaluating", "saving")
_MARKS = {
    "loss": ("✕", "bad", "lost"),
    "kill": ("✕", "bad", "killed by the launcher"),
    "error": ("!", "bad", "error"),
    "joined": ("+", "good", "joined"),
    "join_refused": ("!", "bad", "may not join"),
    "left": ("−", "calm", "left"),
    "scale": ("⇄", "calm", "request to scale"),
    "scaled": ("⇄", "good", "scaled"),
    "signal": ("!", "bad", "signal"),
    "launch": ("▸", "calm", "launch"),
    "resumed": ("↻", "good", "resumed from a checkpoint"),
    "checkpoint": ("▾", "calm", "checkpoint"),
    "checkpoint_failed": ("!", "bad", "checkpoint not written"),
    "checkpoint_damaged": ("!", "bad", "checkpoint damaged"),
    "metrics_failed": ("!", "bad", "metrics not written"),
    "evaluation": ("★", "calm", "evaluation"),
}
"""Events with a mark: the mark, its colour, and what it means."""
_OVER = ("done", "left")
"""States of a task that only exits."""
_OF_TASK = ("loss", "kill", "error")
"""Events whose mark is in the row of the task; the others are in the job's."""


@dataclass(frozen=True)
class _Bar:
    """A part of a task's life.

    Args:
        begin: seconds of the run.
        end: the same.
        state: what it did.
        text: more about it.
    """

    begin: float
    end: float
    state: str
    text: str


def timeline(run: RunData) -> Markup:
    """Returns the time line, its legend, and the list of events."""
    if not run.events:
        return missing("events.jsonl has no events: the run has no time line.")
    end = max(run.seconds, 1e-6)
    names = [str(task.task) for task in run.view.tasks]
    names += sorted({event.task for event in run.events if event.task} - {*names})
    failed = {event.task for event in run.events if _is_of_task(event)}
    shown = names if len(names) <= MOST_ROWS else sorted(names, key=lambda name: name not in failed)[:MOST_ROWS]
    rows = [_row("job", [*_phases(run)], [event for event in run.events if _is_of_job(event)], end)]
    for name in shown:
        marks = [event for event in run.events if event.task == name and _is_of_task(event)]
        rows.append(_row(name, [*_life(run, name)], marks, end))
    scale = [
        tag("span", figures.time(at), class_="x", style=f"left:{at / end:.2%}") for at in figures.time_ticks(0, end, 5)
    ]
    rows.append(tag("div", tag("b"), tag("div", *scale, class_="track scale"), class_="row"))
    omitted = (
        tag("p", f"{len(names) - len(shown)} more tasks are not drawn.", class_="note")
        if len(names) > len(shown)
        else ""
    )
    return join(tag("div", *rows, class_="timeline"), omitted, _legend(run), _list(run.events))


def _is_of_job(event: Happened) -> bool:
    return event.kind in _MARKS and event.kind not in _OF_TASK


def _is_of_task(event: Happened) -> bool:
    """Whether it has a mark in the row of its task; the error of a training that was told to end is none."""
    return event.kind in _OF_TASK and event.line.get("code") != "terminated"


def _row(name: str, bars: list[_Bar], marks: list[Happened], end: float) -> Markup:
    drawn = [
        tag(
            "i",
            class_=f"bar {_class(bar.state)}",
            style=f"left:{bar.begin / end:.2%};width:{max(bar.end - bar.begin, 0) / end:.2%}",
            title=f"{bar.text}, {figures.time(bar.begin)} to {figures.time(bar.end)}",
        )
        for bar in bars
    ]
    for event in marks:
        sign, kind, _ = _MARKS[event.kind]
        title = f"{figures.time(event.at)}: {describe(event)}"
        drawn.append(tag("em", sign, class_=f"mark {kind}", style=f"left:{min(event.at / end, 1):.2%}", title=title))
    return tag("div", tag("b", name), tag("div", *drawn, class_="track"), class_="row")


def _class(state: str) -> str:
    return f"st-{state}" if state in (*_STATES, "failed", "job") else "st-other"


def _life(run: RunData, name: str) -> Iterator[_Bar]:
    """Yields what a task did from each start to its exit."""
    begun, state = None, ""
    for event in run.events:
        if event.kind == "launch" and begun is not None:
            yield _Bar(begun, event.at, state, state)  # its launcher disappeared
            begun = None
        if event.task != name:
            continue
        if event.kind in ("started", "state", "exited") and begun is not None and state not in _OVER:
            yield _Bar(begun, event.at, state, state)
        if event.kind == "started":
            begun, state = event.at, "starting"
        elif event.kind == "state" and begun is not None:
            begun, state = event.at, str(event.line.get("state"))
        elif event.kind == "exited":
            begun = None
            if event.line.get("status") in ("failed", "lost"):
                yield _Bar(event.at, event.at, "failed", str(event.line.get("cause")))
    if begun is not None:
        yield _Bar(begun, run.seconds, state, state)


def _phases(run: RunData) -> Iterator[_Bar]:
    """Yields the phases of the job."""
    begun, phase = 0.0, "running"
    for event in run.events:
        if event.kind == "launch":
            begun, phase = event.at, "running"
        elif event.kind == "phase":
            yield _Bar(begun, event.at, "job", phase)
            begun, phase = event.at, str(event.line.get("phase"))
    if phase != "ended":
        yield _Bar(begun, run.seconds, "job", phase)


def _legend(run: RunData) -> Markup:
    states = {str(event.line.get("state")) for event in run.events if event.kind == "state"} | {"starting"}
    keys = [tag("span", tag("i", class_=f"key st-{state}"), state) for state in _STATES if state in states]
    kinds = {event.kind for event in run.events if _is_of_job(event) or _is_of_task(event)}
    for kind, (sign, colour, text) in _MARKS.items():
        if kind in kinds:
            keys.append(tag("span", tag("em", sign, class_=f"mark key {colour}"), text))
    return tag("div", *keys, class_="legend")


def describe(event: Happened) -> str:
    """An event in words: what is the most important in its line."""
    line = event.line
    match event.kind:
        case "started":
            text = f"started, pid {line.get('pid')}"
        case "exited":
            text = f"{line.get('status')}: {line.get('cause')}"
        case "loss":
            text = f"lost: {line.get('cause')}; restarts {line.get('restarts')}"
        case "phase":
            text = f"{line.get('from')} → {line.get('phase')}: {line.get('cause')}"
        case "state":
            text = str(line.get("state"))
        case "scale" | "scaled":
            text = f"{event.kind} {_replicas(line.get('replicas'))} {line.get('answer') or ''}".strip()
        case _:
            parts = [f"{key} {value}" for key, value in line.items() if key not in _LEFT_OUT and value is not None]
            text = f"{event.kind} {', '.join(parts)}"
    return text


_LEFT_OUT = ("time", "seconds", "attempt", "event", "task", "traceback")


def _replicas(value: object) -> str:
    pairs = value.items() if isinstance(value, dict) else ()
    return format_replicas({role: pair for role, pair in pairs if isinstance(pair, list) and len(pair) == 2})


def _list(events: tuple[Happened, ...]) -> Markup:
    half = MOST_EVENTS // 2
    kept = list(events) if len(events) <= MOST_EVENTS else [*events[:half], *events[-half:]]
    rows = [[figures.time(event.at), event.task or "job", describe(event)[:400]] for event in kept]
    title = f"All {len(events)} events" if len(kept) == len(events) else f"{len(kept)} of {len(events)} events"
    return tag("details", tag("summary", title), table(["time", "task", "event"], rows, class_="events"))
