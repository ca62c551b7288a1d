"""The one loop of a launch: it takes an event, asks the supervisor what follows, and has it done."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tfdist_cli.launch.base import Launcher, Outlets, Run
from tfdist_cli.launch.events import Event, EventQueue, Signalled, Tick
from tfdist_cli.launch.state import JobState, Phase, Rules
from tfdist_cli.launch.supervisor import begin, step
from tfdist_cli.plan import Plan

PERIOD = 0.25
"""Seconds after which watchers are woken when nothing happens."""
_STANDSTILL = 2.0
"""Seconds over its time after which the loop has not merely waited for a processor."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watcher(Protocol):
    """Is shown everything that happens: a display, a log, a record for the report."""

    def saw(self, event: Event, state: JobState, now: float) -> None:
        """Takes an event, or a `Tick` now and then.

        Args:
            event: what has happened.
            state: the job after it.
            now: seconds since the job began.
        """


async def run_job(
    launcher: Launcher, plan: Plan, rules: Rules, outlets: Outlets, watchers: Sequence[Watcher]
) -> JobState:
    """Runs a plan to its end.

    Args:
        launcher: what starts the tasks.
        plan: the tasks.
        rules: when the job is over.
        outlets: where the run's news goes; its queue is the one that is read here.
        watchers: who is shown what happens.

    Returns:
        The final state.
    """
    with _signals_to(outlets.events):
        async with launcher.start(plan, outlets) as run:
            return await supervise(run, plan, rules, outlets.events, watchers)


async def supervise(
    run: Run,
    plan: Plan,
    rules: Rules,
    events: EventQueue,
    watchers: Sequence[Watcher],
    clock: Callable[[], float] = time.monotonic,
) -> JobState:
    """The loop; see `run_job`."""
    began = clock()
    state, actions = begin(rules, (planned.task for planned in plan.tasks), 0.0)
    while True:
        for action in actions:
            run.act(action)
        if state.phase is Phase.ENDED:
            return state
        asked = clock()
        patience = PERIOD if state.deadline is None else min(PERIOD, state.deadline - (asked - began))
        event = await events.get(max(0.0, patience))
        if clock() - asked > PERIOD + _STANDSTILL:
            began += clock() - asked  # the launcher itself was stopped; nobody is late for that
        now = clock() - began
        state, actions = step(state, event, now)
        for watcher in watchers:
            watcher.saw(event, state, now)
        if state.deadline is not None and now >= state.deadline:  # however many events come
            state, due = step(state, Tick(), now)
            actions += due
            for watcher in watchers:
                watcher.saw(Tick(), state, now)


@contextmanager
def _signals_to(events: EventQueue) -> Iterator[None]:
    """Puts the signals to the launcher on the queue. A hang-up that nohup has switched off stays off."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number in _SIGNALS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, events.put, Signalled(number))
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])  # asyncio puts Python's own in its place, not what was there
