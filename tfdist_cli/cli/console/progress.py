"""The display of a launch: the tasks' output lines and the progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tfdist_cli.cli.console.lines import TaskLines, neutral
from tfdist_cli.cli.console.remaining import RemainingTime
from tfdist_cli.cli.console.usage import usage_cells
from tfdist_cli.launch.run.report import cause_of, describe_exit, format_replicas, signal_name
from tfdist_cli.launch.supervisor.events import (
    Event,
    Exited,
    NetworkReady,
    Output,
    ProfileAccepted,
    ProfileRefused,
    RecordReceived,
    RequestAnswered,
    ResizeAccepted,
    SignalReceived,
)
from tfdist_cli.launch.supervisor.membership import failed_to_join
from tfdist_cli.launch.supervisor.state import JobState, LostTask, Phase, Status
from tfdist_cli.launch.usage import total_usage
from tfdist_cli.spec.roles import ROLES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tfdist_cli.launch.run.snapshot import Progress, RunSnapshot
from tfdist_cli.spec.task_id import TaskId

_REFRESH = 0.25
"""Seconds between two updates of the live table; output lines are delayed by at most as long."""
_LINES_AT_ONCE = 1000
_PLAIN_PERIOD = 5.0
"""Seconds between two progress lines when stderr is no terminal."""


class Display:
    """Shows a job as plain lines: the tasks' output, and the progress every few seconds.

    A watcher of the job. If the terminal is closed, the display stops printing and the training continues.

    Args:
        console: the terminal, or a file.
        snapshot: the state that the tasks have reported.
    """

    def __init__(self, console: Console, snapshot: RunSnapshot) -> None:
        self._console = console
        self._snapshot = snapshot
        self._phase = Phase.RUNNING
        self._losses_shown = 0
        self._shown_at = 0.0
        self._shown: Progress | None = None
        self._remaining = RemainingTime()

    def on_event(self, event: Event, state: JobState, now: float) -> None:
        """Shows the changes since the last event."""
        if isinstance(event, Output):
            self._lines(event)
        for loss in state.lost_tasks[self._losses_shown :]:
            self._notice(_restart(loss, state))
        for notice in (*_request_notices(event), *_notices(event, state, self._phase)):
            self._notice(notice)
        self._phase, self._losses_shown = state.phase, len(state.lost_tasks)
        self._tick(state, now)

    def _lines(self, event: Output) -> None:
        lines = TaskLines()
        lines.add(event.task, event.lines)
        self._print(lines)

    def _notice(self, text: str) -> None:
        self._print(Text(f"[tfdist] {text}\n", style="bold"))

    def _tick(self, state: JobState, now: float) -> None:  # noqa: ARG002
        progress = self._snapshot.progress
        left = self._remaining.update(progress, now)
        if progress is None or progress is self._shown or now - self._shown_at < _PLAIN_PERIOD:
            return
        self._shown, self._shown_at = progress, now
        self._notice(progress_text(progress, left))

    def _print(self, what: RenderableType) -> None:
        self._write(lambda: self._console.print(what, end="", soft_wrap=True, markup=False, highlight=False))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError:
            self._console.quiet = True


class LiveDisplay(Display):
    """Shows a job on a terminal: a table that is redrawn, below the scrolling output of the tasks."""

    def __init__(self, console: Console, snapshot: RunSnapshot) -> None:
        super().__init__(console, snapshot)
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._waiting = TaskLines()
        self._drawn = 0.0

    @contextmanager
    def on_screen(self) -> Iterator[LiveDisplay]:
        """Shows the table until the context exits; output lines stay on the screen."""
        self._write(self._live.start)
        try:
            yield self
        finally:
            self._flush()
            self._write(self._live.stop)

    def _lines(self, event: Output) -> None:
        self._waiting.add(event.task, event.lines)
        if self._waiting.count >= _LINES_AT_ONCE:
            self._flush()

    def _notice(self, text: str) -> None:
        self._flush()
        super()._notice(text)

    def _tick(self, state: JobState, now: float) -> None:
        left = self._remaining.update(self._snapshot.progress, now)
        if now - self._drawn < _REFRESH:
            return
        self._drawn = now
        self._live.update(_render(state, self._snapshot, _Frame(now, left, *self._console.size)))
        self._flush()
        self._write(self._live.refresh)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, TaskLines()
        if waiting.count:
            self._print(waiting)


@dataclass(frozen=True)
class _Frame:
    """One picture of the table.

    Args:
        now: seconds since the job began.
        left: the remaining seconds; None if unknown.
        width: the terminal's, in characters.
        height: the terminal's, in lines.
    """

    now: float
    left: float | None
    width: int
    height: int


def progress_text(progress: Progress, left: float | None) -> str:
    """Formats the progress in one line: step, epoch, rate, remaining time, metrics.

    Args:
        progress: the chief's last report.
        left: the remaining seconds; None if unknown.
    """
    total = "" if progress.total is None else f"/{progress.total}"
    parts = [f"step {progress.step}{total}"]
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}" + (f"/{progress.epochs}" if progress.epochs is not None else ""))
    if progress.steps_per_second:
        parts.append(f"{progress.steps_per_second:.1f} steps/s")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return neutral("  ".join([*parts, metrics_text(progress.metrics)]).rstrip())


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`accuracy 0.914  loss 0.312`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03` or `3.4 s`."""
    if not math.isfinite(seconds):
        return "unlimited"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def scaled_text(scaled: Mapping[str, Any]) -> str:
    """What became of a change of the numbers of tasks, from a line `scaled` of the events; empty if it goes on."""
    took = scaled.get("took")
    if took is None:
        return ""
    happened = [f"{', '.join(names)} {what}" for key, what in _HAPPENED if (names := scaled.get(key))]
    if happened and scaled.get("live", True):
        return f"{' and '.join(happened)} after {duration(took)}; the others continued"
    where = "from the beginning" if scaled.get("resumed") is None else f"from step {scaled['resumed']}"
    if scaled.get("reverted"):
        happened.append(f"with the numbers from before, since {scaled['reverted']}")
    return "; ".join([f"training continued {where} after {duration(took)}", *happened])


_HAPPENED = (("joined", "joined"), ("left", "left"), ("failed", "failed to join"), ("lost", "lost"))


def _restart(loss: LostTask, state: JobState) -> str:
    if loss.resizing and state.resizes[-1].reverted == loss:
        return f"{loss.task} failed: {cause_of(loss)}; starting the tasks of before"
    if loss.resizing:
        return f"{loss.task} was lost before it had saved: {cause_of(loss)}"
    what = "restarting it" if loss.alone else "restarting all tasks from the last checkpoint"
    when = f" in {loss.delay:g} s" if loss.delay else ""
    used = f"restart {state.restarts} of {state.policy.max_restarts}"
    return f"{loss.task} was lost: {cause_of(loss)}; {what}{when} ({used})"


def _request_notices(event: Event) -> Iterator[str]:
    """Yields notices about requests of `tfdist scale` and `tfdist profile`."""
    match event:
        case ProfileAccepted(task, order):
            yield f"profiling {task} for {order.seconds:g} s"
        case ProfileRefused(_, task, reason):
            yield f"rejected a request to profile {task}: {reason}"
        case ResizeAccepted(_, replicas, _, joins, leaves) if event.is_live:
            names = ", ".join(str(task) for task in (*joins, *leaves))
            yield f"scaling {format_replicas(replicas)}: {names}; the others continue"
        case ResizeAccepted(_, replicas, _, _, _, because):
            why = f": {because}" if because else ""
            yield f"scaling {format_replicas(replicas)} through a checkpoint{why}"
        case RequestAnswered(_, "refused", _, reason, _):
            yield f"rejected a request to scale: {reason}"


def _notices(event: Event, state: JobState, before: Phase) -> Iterator[str]:
    """Yields notices about the launcher's reactions to an event."""
    if isinstance(event, NetworkReady):
        yield event.text
    yield from _membership_notices(event, state)
    if isinstance(event, Exited) and state.tasks[event.task].status is Status.FAILED:
        not_restarted_because = state.tasks[event.task].not_restarted_because
        if not state.restarting:
            yield f"{event.task} failed: {describe_exit(state.tasks[event.task])}" + (
                f"; {not_restarted_because}" if not_restarted_because else ""
            )
    if state.phase is before:
        return
    limit = f"{state.policy.timeouts.shutdown:g} s"
    match state.phase:
        case Phase.EVALUATING:
            yield "training finished; waiting for the evaluator to score the last checkpoint"
        case Phase.SAVING if state.restarting:
            yield f"waiting up to {limit} for a checkpoint"
        case Phase.SAVING:
            reason = f"{signal_name(event.signum)}: " if isinstance(event, SignalReceived) else ""
            yield f"{reason}waiting up to {limit} for a checkpoint; Ctrl-C kills all tasks"
        case Phase.STOPPING if state.start_timed_out:
            yield "start timeout: not all tasks are up; stopping all tasks"
        case Phase.KILLING if not state.restarting:
            yield "killing the remaining tasks: " + ", ".join(str(task) for task in state.alive)


def _membership_notices(event: Event, state: JobState) -> Iterator[str]:
    """Yields notices about tasks that have joined the running training, or left it."""
    match event:
        case RecordReceived(_, {"kind": "joined"}):
            yield f"{neutral(str(event.record.get('worker')))} has joined the training"
        case RecordReceived(_, {"kind": "join_refused"}):
            worker, reason = (neutral(str(event.record.get(key))) for key in ("worker", "reason"))
            yield f"{worker} may not join: {reason}"
        case Exited(task, _) if state.tasks[task].status is Status.LEFT:
            yield f"{task} has left the training, which continues"
        case Exited(task, _) if failed_to_join(state, task):
            yield f"{task} failed to join: {describe_exit(state.tasks[task])}; the training continues without it"


def _render(state: JobState, snapshot: RunSnapshot, frame: _Frame) -> Group:
    fits = len(state.tasks) <= max(frame.height - 6, 3)
    rows = [*(_task_rows(state, snapshot) if fits else _role_rows(state, snapshot))]
    used = [index for index in range(_COLUMNS) if any(row[index].plain for row in rows)]
    while used and sum(_width(rows, index) for index in used) > frame.width - _LEAST_OUTPUT and used[-1] > _NEEDED:
        used.pop()  # a narrow terminal has no room for all of them
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in used:
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*(row[index] for index in used), row[-1])
    return Group(Text(), table, _progress_row(snapshot.progress, frame))


_COLUMNS = 7
"""Task, state, rate, and four of usage: columns without content are left out. After them comes the last output line."""
_NEEDED = 2
"""The last column that is shown however narrow the terminal is."""
_LEAST_OUTPUT = 16
"""Characters that are kept free for the last output line."""


def _width(rows: Sequence[Sequence[Text]], index: int) -> int:
    return max(row[index].cell_len for row in rows) + 2


def _task_rows(state: JobState, snapshot: RunSnapshot) -> Iterator[tuple[Text, ...]]:
    for task in state.tasks:
        rate = _rate(snapshot.progress, task)
        usage = None if state.tasks[task].status.ended else snapshot.of(task).usage
        yield (
            Text(str(task), style=task.traits.colour),
            Text(_task_state(task, state, snapshot)),
            Text(f"{rate:.1f} steps/s" if rate else "", justify="right"),
            *(Text(neutral(cell), justify="right") for cell in usage_cells(usage)),
            Text(neutral(snapshot.of(task).last), style="dim"),
        )


def _role_rows(state: JobState, snapshot: RunSnapshot) -> Iterator[tuple[Text, ...]]:
    """Yields one row per role, for clusters whose tasks do not fit on the screen; usage is that of all its tasks."""
    for role, traits in ROLES.items():
        tasks = [task for task in state.tasks if task.role == role]
        ended = {task: state.tasks[task].status for task in tasks if state.tasks[task].status.ended}
        doing = Counter(ended[task].value if task in ended else _task_state(task, state, snapshot) for task in tasks)
        rate = sum(_rate(snapshot.progress, task) for task in tasks)
        total = total_usage([usage for task in tasks if task not in ended and (usage := snapshot.of(task).usage)])
        if tasks:
            yield (
                Text(f"{role} ×{len(tasks)}", style=traits.colour),
                Text(", ".join(f"{count} {what}" for what, count in doing.most_common(4))),
                Text(f"{rate:.1f} steps/s" if rate else "", justify="right"),
                *(Text(cell, justify="right") for cell in usage_cells(total)),
                Text(),
            )


def _task_state(task: TaskId, state: JobState, snapshot: RunSnapshot) -> str:
    each = state.tasks[task]
    if each.start_at is not None or state.phase is Phase.PAUSED:
        return f"{describe_exit(each)}; waiting for restart"
    if each.status.ended:
        return "done" if each.status is Status.DONE else describe_exit(each)
    if each.stop_sent:
        return "stopping"
    parts = (snapshot.of(task).state, snapshot.of(task).evaluated)
    return neutral(", ".join(part for part in parts if part)) or ("starting" if state.policy.reports else "running")


def _rate(progress: Progress | None, task: TaskId) -> float:
    return progress.workers.get(str(task), 0.0) if progress else 0.0


def _progress_row(progress: Progress | None, frame: _Frame) -> RenderableType:
    row, now = Table.grid(padding=(0, 2)), frame.now
    if progress is None:
        row.add_row(Text(duration(now)))
    elif progress.total:
        row.add_row(
            Text(duration(now)),
            ProgressBar(progress.total, min(progress.step, progress.total), width=24),
            Text(progress_text(progress, frame.left), no_wrap=True, overflow="ellipsis"),
        )
    else:
        row.add_row(Text(duration(now)), Text(progress_text(progress, frame.left), no_wrap=True, overflow="ellipsis"))
    return row
