"""The loop of a launch: takes an event, asks the supervisor what follows, and carries out the actions."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tfdist_cli.launch.run.planner import RequestHandler
from tfdist_cli.launch.run.requests import SIGNAL as REQUEST_SIGNAL
from tfdist_cli.launch.supervisor.events import (
    Event,
    EventQueue,
    RequestReceived,
    ResizeAccepted,
    SignalReceived,
    Tick,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext, Launcher, Run
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobPolicy, JobState, Phase
from tfdist_cli.plan.plan import Plan

PERIOD = 0.25
"""Seconds after which watchers get a `Tick` if no event arrives."""
_STANDSTILL = 2.0
"""Seconds beyond the end of a wait, without processor time, that show that the launcher itself was stopped."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watcher(Protocol):
    """Observes all events: a display, a log, the collector of the report's data."""

    def on_event(self, event: Event, state: JobState, now: float) -> None:
        """Handles an event, or a `Tick` now and then.

        Args:
            event: the event.
            state: the job's state after it.
            now: seconds since the job began.
        """


async def run_job(
    launcher: Launcher,
    plan: Plan,
    policy: JobPolicy,
    context: LaunchContext,
    watchers: Sequence[Watcher],
    request_handler: RequestHandler | None = None,
) -> JobState:
    """Runs a plan to its end.

    Args:
        launcher: starts the tasks.
        plan: the tasks.
        policy: the user's configuration of timeouts and restarts.
        context: what the launcher gets; this loop reads its queue.
        watchers: observers of the events.
        request_handler: answers requests, and plans the job after a resize; None to accept no requests.

    Returns:
        The final state.

    Raises:
        UsageError: after a resize, a task cannot run at its configured address.
    """
    with _signals_to(context.events, requests=request_handler is not None):
        supervisor = Supervisor(policy, plan, context.events, watchers, request_handler)
        while True:
            async with launcher.start(plan, context) as run:
                await supervisor.supervise(run)
                while request_handler and plan.cluster.launcher_traits.run_lasts and supervisor.needs_plan:
                    plan = request_handler.plan(supervisor.state.wanted)
                    run.follow(plan)
                    await supervisor.supervise(run)
            if request_handler is None or supervisor.state.phase is Phase.ENDED:
                return supervisor.state
            plan = request_handler.plan(supervisor.state.wanted)


class Supervisor:
    """The loop; see `run_job`.

    Args:
        policy: the user's configuration of timeouts and restarts.
        plan: the first plan.
        events: the queue of events.
        watchers: observers of the events.
        request_handler: answers requests.
        clock: a monotonic clock, in seconds.
        cpu_clock: seconds of processor time that this process has used.
    """

    def __init__(
        self,
        policy: JobPolicy,
        plan: Plan,
        events: EventQueue,
        watchers: Sequence[Watcher],
        request_handler: RequestHandler | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._events = events
        self._cpu_clock = cpu_clock
        self._watchers = watchers
        self._request_handler = request_handler
        self._clock = clock
        self._started = clock()
        self.state, self._actions = begin(policy, (planned.task for planned in plan.tasks), 0.0)

    async def supervise(self, run: Run) -> None:
        """Handles events until the job has ended, or until a resize needs a run with another plan."""
        while True:
            actions, self._actions = self._actions, ()
            for action in actions:
                run.act(action)
            if self.state.phase is Phase.ENDED:
                return
            needed_plan = self.needs_plan
            await self._handle_next(run)
            if self.needs_plan and not needed_plan:
                return

    @property
    def needs_plan(self) -> bool:
        """Whether all tasks have exited for a resize, so that the next ones need another plan."""
        return self.state.phase is Phase.PAUSED and self.state.resizing

    async def _handle_next(self, run: Run) -> None:
        """Waits for the next event, and handles it and the timeouts that are due."""
        began, cpu_began = self._clock(), self._cpu_clock()
        deadline = self.state.deadline
        patience = PERIOD if deadline is None else min(PERIOD, deadline - (began - self._started))
        event = await self._events.get(max(0.0, patience))
        stopped = self._clock() - began - (self._cpu_clock() - cpu_began)
        if stopped > PERIOD + _STANDSTILL:
            self._started += stopped  # the launcher was stopped itself, so no task has missed a timeout
        now = self._clock() - self._started
        if isinstance(event, RequestReceived) and self._request_handler:
            for request in self._request_handler.requests():
                answer = self._request_handler.answer(request, self.state)
                if isinstance(answer, ResizeAccepted) and answer.is_live and self._request_handler.extended:
                    run.follow(self._request_handler.extended)
                self._handle(answer, now)
        needed_plan = self.needs_plan
        self._handle(event, now)
        deadline = self.state.deadline
        if deadline is not None and now >= deadline and needed_plan == self.needs_plan:  # even if events keep coming
            self._handle(Tick(), now)

    def _handle(self, event: Event, now: float) -> None:
        self.state, actions = step(self.state, event, now)
        self._actions += actions
        for watcher in self._watchers:
            watcher.on_event(event, self.state, now)


@contextmanager
def _signals_to(events: EventQueue, *, requests: bool = False) -> Iterator[None]:
    """Puts signals to the launcher on the queue. SIGHUP stays ignored if nohup has set it to be."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if number != signal.SIGHUP or before[number] != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, events.put, SignalReceived(number))
    if requests:
        loop.add_signal_handler(REQUEST_SIGNAL, events.put, RequestReceived())
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])  # asyncio sets Python's default handler, not the previous one
        if requests:
            loop.remove_signal_handler(REQUEST_SIGNAL)
