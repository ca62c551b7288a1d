"""The one loop of a launch: it takes an event, asks the supervisor what follows, and has it done."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tfdist_cli.launch.run.planner import Desk
from tfdist_cli.launch.run.requests import SIGNAL as REQUEST_SIGNAL
from tfdist_cli.launch.supervisor.events import Asked, Event, EventQueue, Signalled, Tick
from tfdist_cli.launch.supervisor.launcher import Launcher, Outlets, Run
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobState, Phase, Rules
from tfdist_cli.plan.plan import Plan

PERIOD = 0.25
"""Seconds after which watchers are woken when nothing happens."""
_STANDSTILL = 2.0
"""Seconds over its time, without work, after which the loop has not merely waited for a processor."""
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
    launcher: Launcher,
    plan: Plan,
    rules: Rules,
    outlets: Outlets,
    watchers: Sequence[Watcher],
    desk: Desk | None = None,
) -> JobState:
    """Runs a plan to its end.

    Args:
        launcher: what starts the tasks.
        plan: the tasks.
        rules: when the job is over.
        outlets: where the run's news goes; its queue is the one that is read here.
        watchers: who is shown what happens.
        desk: answers requests, and makes the plan of a job that is resized; without it there are none.

    Returns:
        The final state.

    Raises:
        UsageError: a task of a job that is resized cannot run where the cluster wants it.
    """
    with _signals_to(outlets.events, requests=desk is not None):
        job = Supervision(rules, plan, outlets.events, watchers, desk)
        while True:
            async with launcher.start(plan, outlets) as run:
                await job.carry_out(run)
            if desk is None or job.state.phase is Phase.ENDED:
                return job.state
            plan = desk.plan()


class Supervision:
    """The loop; see `run_job`.

    Args:
        rules: when the job is over.
        plan: the tasks that it begins with.
        events: what it hears.
        watchers: who is shown what happens.
        desk: answers requests.
        clock: seconds from any moment on.
        worked: seconds of processor time that this process has used.
    """

    def __init__(
        self,
        rules: Rules,
        plan: Plan,
        events: EventQueue,
        watchers: Sequence[Watcher],
        desk: Desk | None = None,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.process_time,
    ) -> None:
        self._events = events
        self._worked = worked
        self._watchers = watchers
        self._desk = desk
        self._clock = clock
        self._began = clock()
        self.state, self._actions = begin(rules, (planned.task for planned in plan.tasks), 0.0)

    async def carry_out(self, run: Run) -> None:
        """Goes on until the job has ended, or all tasks have for others, which need a run of their own."""
        while True:
            actions, self._actions = self._actions, ()
            for action in actions:
                run.act(action)
            if self.state.phase is Phase.ENDED:
                return
            emptied = self._emptied
            await self._hear()
            if self._emptied and not emptied:
                return

    @property
    def _emptied(self) -> bool:
        """Whether no task is there any more, and the next ones are of another plan."""
        return self.state.phase is Phase.PAUSED and self.state.resizing

    async def _hear(self) -> None:
        """Takes the next event, and has due what is due."""
        asked, worked = self._clock(), self._worked()
        deadline = self.state.deadline
        patience = PERIOD if deadline is None else min(PERIOD, deadline - (asked - self._began))
        event = await self._events.get(max(0.0, patience))
        stood = self._clock() - asked - (self._worked() - worked)
        if stood > PERIOD + _STANDSTILL:
            self._began += stood  # the launcher itself was stopped; nobody is late for that
        now = self._clock() - self._began
        if isinstance(event, Asked) and self._desk:
            for request in self._desk.requests():
                self._take(self._desk.answer(request, self.state), now)
        emptied = self._emptied
        self._take(event, now)
        deadline = self.state.deadline
        if deadline is not None and now >= deadline and emptied == self._emptied:  # however many events come
            self._take(Tick(), now)

    def _take(self, event: Event, now: float) -> None:
        self.state, actions = step(self.state, event, now)
        self._actions += actions
        for watcher in self._watchers:
            watcher.saw(event, self.state, now)


@contextmanager
def _signals_to(events: EventQueue, *, requests: bool = False) -> Iterator[None]:
    """Puts the signals to the launcher on the queue. A hang-up that nohup has switched off stays off."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number in _SIGNALS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, events.put, Signalled(number))
    if requests:
        loop.add_signal_handler(REQUEST_SIGNAL, events.put, Asked())
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])  # asyncio puts Python's own in its place, not what was there
        if requests:
            loop.remove_signal_handler(REQUEST_SIGNAL)
