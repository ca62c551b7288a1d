"""Running a plan on any launcher, and what is seen of that: used by the tests of each."""

import asyncio
from collections import defaultdict
from typing import Any

from tfdist_cli.launch.run.event_loop import run_job
from tfdist_cli.launch.supervisor.events import EventQueue, Exited, Output
from tfdist_cli.launch.supervisor.launcher import LaunchContext


class Outcome:
    """A run that has ended; a watcher and the logs while it goes on.

    Args:
        react: called with each event and the state after it; gives events that follow.
        keep: whether events and logs are kept.
    """

    def __init__(self, react=lambda event, state: (), *, keep=True):
        self.react = react
        self.keep = keep
        self.queue: Any = None
        self.state: Any = None
        self.events = []
        self.logs = defaultdict(bytes)

    def run(self, launcher, plan, policy, own=lambda start: {}):
        """Runs a plan; `own` gives the variables of a task that is about to start."""

        async def whole():
            self.queue = EventQueue()
            return await run_job(launcher, plan, policy, LaunchContext(self.queue, self, own), (self,))

        self.state = asyncio.run(whole())
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
        """The lines shown of a stream, of one task or of all; None for both streams."""
        said = [event for event in self.of(Output) if task in (None, event.task) and stream in (None, event.stream)]
        return [line for event in said for line in event.lines]

    def exits(self):
        return {event.task: event for event in self.of(Exited)}
