"""Which task is waited for when a training stands still.

Each task gives a sign of life every few seconds, from a thread of its own: a process that is stopped, or a host that is
cut off, gives none. A training whose tasks all answer may still make no step. What counts as getting on is anything
new that a task which decides says: a further step, another thing that it does (evaluating, saving), a checkpoint. Where
no steps are to be expected (before the first one, in an evaluation, while saving) work counts as well: as long as the
tasks use the processor, they compile, score or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tfdist_cli.launch.supervisor.failure_order import tells_of_another
from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.spec.task_id import TaskId

SILENCE = 6.0
"""Seconds without a sign of life after which a task is the one that a training without steps waits for."""
_WORK = 0.2
"""Cores that have to be busy over the stall timeout for the tasks to be at work."""


def look(state: JobState, now: float) -> tuple[JobState, dict[TaskId, str]]:
    """Looks for tasks of which nothing comes any more.

    Returns:
        The state, and the tasks that are to be killed, each with the reason.
    """
    timeout = state.rules.timeouts.stall
    silent = _silent(state, now, timeout)
    if silent:
        reasons = {name: _no_sign(seconds) for name, seconds in silent.items()}
        return moved(state, now), reasons
    if not state.watches_steps or now < state.moved_at + timeout:
        return state, {}
    since = now - state.moved_at
    at_work = _without_steps(state) and state.computed >= _WORK * timeout
    return moved(state, now), {} if at_work else _waited_for(state, f"no step was made for {since:.1f} s", now)


def silent_when_it_failed(state: JobState, failed: TaskId, now: float) -> JobState:
    """The state in which tasks that stand still are blamed for the failure of one that has missed them.

    TensorFlow's own patience with a task that does not answer may be shorter than the stall timeout.
    """
    if not tells_of_another(state.tasks[failed].error):
        return state
    blamed = {
        name: replace(state.tasks[name], stalled=_no_sign(seconds), silent_since=state.tasks[name].beat_at)
        for name, seconds in _silent(state, now, SILENCE).items()
    }
    return replace(state, tasks={**state.tasks, **blamed})


def _no_sign(seconds: float) -> str:
    return f"it gave no sign of life for {seconds:.1f} s"


def _waited_for(state: JobState, what: str, now: float) -> dict[TaskId, str]:
    """The tasks that the others wait for."""
    silent = _silent(state, now, SILENCE)
    if silent:
        return {name: f"{what}, and {_no_sign(seconds)}" for name, seconds in silent.items()}
    lagging = [name for name in state.alive if state.tasks[name].lags]
    if lagging:
        return dict.fromkeys(lagging, f"{what}, and it was the one that had taken none before that")
    held = [name for name in state.alive if state.tasks[name].held]
    if held:
        return dict.fromkeys(held, f"{what}, and a call in it does not return and keeps the interpreter")
    doing = ", ".join(f"{name} says {state.tasks[name].doing or 'nothing'!r}" for name in state.alive[:10])
    first = next((name for name in state.alive if state.rules.decides(name)), state.alive[0])
    return {first: f"{what}, though every task gives signs of life: they wait for one another ({doing})"}


def _without_steps(state: JobState) -> bool:
    """Whether the training does something that has no steps: it compiles the first one, scores or saves."""
    deciding = (task for name, task in state.tasks.items() if state.rules.decides(name))
    return state.here is None or any(task.doing not in ("", "training") for task in deciding)


def _silent(state: JobState, now: float, patience: float) -> Mapping[TaskId, float]:
    """The tasks that have given no sign of life for so long, and how long it is."""
    silence = {name: now - (state.tasks[name].beat_at or 0.0) for name in state.watched}
    return {name: seconds for name, seconds in silence.items() if seconds >= patience}


def beat(state: JobState, name: TaskId, computed: float | None, now: float, *, held: bool = False) -> JobState:
    """The state after a sign of life.

    Args:
        state: the state before.
        name: who gave it.
        computed: seconds of processor time that the task has used since it was started; None when it did not say.
        now: the time.
        held: whether a call keeps the task's interpreter to itself.
    """
    task = state.tasks[name]
    computed = task.computed if computed is None else computed
    more = max(0.0, computed - task.computed)
    tasks = {**state.tasks, name: replace(task, beat_at=now, computed=computed, held=held)}
    return replace(state, tasks=tasks, computed=state.computed + more)


def moved(state: JobState, now: float) -> JobState:
    """The state after the training has got on."""
    return replace(state, moved_at=now, computed=0.0)
