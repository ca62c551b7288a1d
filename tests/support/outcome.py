"""Runs a plan on any launcher, and records its events; used by the tests of each launcher."""

import asyncio
from collections import defaultdict
from typing import Any

from tfdist_cli.launch.run.event_loop import run_job
from tfdist_cli.launch.supervisor.events import EventQueue, Exited, Output, ResizeAccepted
from tfdist_cli.launch.supervisor.launcher import LaunchContext


class OneJoin:
    """Answers the first request of a run: a task joins, with this plan from then on."""

    def __init__(self, task, extended):
        self.task, self.extended = task, extended

    def requests(self):
        yield "request"

    def answer(self, request, state):
        tasks = tuple(planned.task for planned in self.extended.tasks)
        return ResizeAccepted(request, {self.task.role: (1, 2)}, tasks, joins=(self.task,))


class Outcome:
    """The outcome of a run; its watcher and logs while it runs.

    Args:
        react: called with each event and the state after it; returns further events.
        keep: whether to keep events and logs.
    """

    def __init__(self, react=lambda event, state: (), *, keep=True):
        self.react = react
        self.keep = keep
        self.queue: Any = None
        self.state: Any = None
        self.events = []
        self.logs = defaultdict(bytes)

    def run(self, launcher, plan, policy, own=lambda start: {}, request_handler=None):
        """Runs a plan; `own` returns additional variables of a task before its start."""

        async def run():
            self.queue = EventQueue()
            return await run_job(launcher, plan, policy, LaunchContext(self.queue, self, own), (self,), request_handler)

        self.state = asyncio.run(run())
        return self

    def write(self, task, stream, data):
        if self.keep:
            self.logs[task, stream] += data

    def on_event(self, event, state, now):
        if self.keep:
            self.events.append(event)
        for answer in self.react(event, state) or ():
            self.queue.put(answer)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def lines(self, task=None, stream="stdout"):
        """The lines of a stream, of one task or of all; None for both streams."""
        outputs = [event for event in self.of(Output) if task in (None, event.task) and stream in (None, event.stream)]
        return [line for event in outputs for line in event.lines]

    def exits(self):
        return {event.task: event for event in self.of(Exited)}
