"""Finds the task that a stalled training waits for.

Each task sends a heartbeat every few seconds, from a separate thread. A stopped process or an unreachable host sends
none. A training whose tasks all send heartbeats may still make no step. Progress is anything new that a deciding task
reports: a further step, another state (evaluating, saving), a checkpoint. Where no steps are expected (before the first
one, during an evaluation, while saving), processor time counts as progress as well: tasks that use the processor
compile, evaluate or read data. Between steps, functions are compiled as well: those of several steps at the start, and
those of a worker that is started again. So tasks that compute get more time there, but not without end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.spec.task_id import TaskId

SILENCE = 6.0
"""Seconds without a heartbeat after which a task is the one that a training without steps waits for."""
_COMPUTING = 3
"""Stall timeouts between two steps after which even tasks that compute are stalled."""
_BUSY_CORES = 0.2
"""Cores that must be busy, averaged over the stall timeout, for the tasks to count as computing."""


def find_stalled(state: JobState, now: float) -> tuple[JobState, dict[TaskId, str]]:
    """Finds tasks that do not answer, or that keep the training from making steps.

    Returns:
        The state, and the tasks to kill, each with the reason.
    """
    timeout = state.policy.timeouts.stall
    silent = _silent(state, now, timeout)
    if silent:
        reasons = {name: _no_heartbeat(seconds) for name, seconds in silent.items()}
        return with_progress(state, now), reasons
    if not state.step_expected or now < state.progressed_at + timeout:
        return state, {}
    since = now - state.reported_at
    may_compute = _without_steps(state) or since < _COMPUTING * timeout
    if may_compute and state.cpu_seconds >= _BUSY_CORES * timeout:
        return replace(with_progress(state, now), reported_at=state.reported_at), {}
    return with_progress(state, now), _waited_for(state, f"no step for {since:.1f} s", now)


def with_silent_tasks(state: JobState, failed: TaskId, now: float) -> JobState:
    """Marks the silent tasks as stalled when another task fails because it gets no answer from them.

    TensorFlow's own timeouts may be shorter than the stall timeout.
    """
    if not state.tasks[failed].error.is_consequence:
        return state
    stalled = {
        name: replace(
            state.tasks[name], stall_reason=_no_heartbeat(seconds), silent_since=state.tasks[name].heartbeat_at
        )
        for name, seconds in _silent(state, now, SILENCE).items()
    }
    return replace(state, tasks=state.tasks.with_states(stalled))


def with_heartbeat(
    state: JobState, name: TaskId, cpu_seconds: float | None, now: float, *, gil_blocked: bool = False
) -> JobState:
    """The state after a heartbeat.

    Args:
        state: the state before.
        name: the task that sent it.
        cpu_seconds: processor time that the task has used since its start; None if it reported none.
        now: the time.
        gil_blocked: whether a native call keeps the task's Python threads from running.
    """
    task = state.tasks[name]
    cpu_seconds = task.cpu_seconds if cpu_seconds is None else cpu_seconds
    more = max(0.0, cpu_seconds - task.cpu_seconds)
    task = replace(task, heartbeat_at=now, cpu_seconds=cpu_seconds, gil_blocked=gil_blocked)
    return replace(state, tasks=state.tasks.with_states({name: task}), cpu_seconds=state.cpu_seconds + more)


def with_progress(state: JobState, now: float) -> JobState:
    """The state after the training has made progress."""
    return replace(state, progressed_at=now, reported_at=now, cpu_seconds=0.0)


def _no_heartbeat(seconds: float) -> str:
    return f"no heartbeat for {seconds:.1f} s"


def _waited_for(state: JobState, what: str, now: float) -> dict[TaskId, str]:
    """The tasks that the others wait for, each with the reason."""
    silent = _silent(state, now, SILENCE)
    if silent:
        return {name: f"{what}, and {_no_heartbeat(seconds)}" for name, seconds in silent.items()}
    lagging = [name for name in state.alive if state.tasks[name].lagging]
    if lagging:
        return dict.fromkeys(lagging, f"{what}, and it was the task that had made no step before that")
    blocked = [name for name in state.alive if state.tasks[name].gil_blocked]
    if blocked:
        return dict.fromkeys(blocked, f"{what}, and a native call in it does not return and holds the interpreter lock")
    reported = ", ".join(f"{name}: {state.tasks[name].reported_state or 'no state'}" for name in state.alive[:10])
    first = next((name for name in state.alive if state.policy.decides(name)), state.alive[0])
    return {first: f"{what}, although every task sends heartbeats: they wait for one another ({reported})"}


def _without_steps(state: JobState) -> bool:
    """Whether the training is in a part without steps: compiling the first one, evaluating or saving."""
    deciding = (task for name, task in state.tasks.items() if state.policy.decides(name))
    return state.attempt_step is None or any(task.reported_state not in ("", "training") for task in deciding)


def _silent(state: JobState, now: float, patience: float) -> Mapping[TaskId, float]:
    """The tasks without a heartbeat for at least `patience` seconds, and how long that is."""
    since = {name: state.tasks[name].heartbeat_at or 0.0 for name in state.heartbeat_expected}
    # Compared as in the deadline: the rounded difference may be a little less than `patience` at that time.
    return {name: now - beat for name, beat in since.items() if now >= beat + patience}
