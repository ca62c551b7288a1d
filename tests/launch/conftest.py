import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tfdist_cli.launch.base import Outlets
from tfdist_cli.launch.events import EventQueue, Output
from tfdist_cli.launch.job import run_job
from tfdist_cli.launch.local import LocalLauncher
from tfdist_cli.launch.state import Rules, Timeouts
from tfdist_cli.plan import make_plan
from tfdist_cli.resources import Machine
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


@pytest.fixture
def make_cluster():
    """A cluster by its strategy and the number of tasks, or the addresses, of its roles."""

    def make(strategy="multi_worker_mirrored", **roles):
        given = {
            role: {"replicas": tasks} if isinstance(tasks, int) else {"hosts": tasks} for role, tasks in roles.items()
        }
        return Cluster.model_validate({"strategy": strategy, "roles": given})

    return make


@pytest.fixture
def plan_for(tmp_path):
    """A plan in which the tasks of a cluster run a command."""

    def make(cluster, *command, run_dir=tmp_path, addresses=None):
        addresses = addresses or {task: cluster.address(task) for task in cluster.tasks}
        return make_plan(cluster, None, addresses=addresses, run_dir=run_dir, machine=Machine(2), command=command)

    return make


W0 = TaskId("worker", 0)


class Outcome:
    """A run that has ended; a watcher and the logs while it goes on."""

    def __init__(self, react, *, keep=True):
        self.react = react
        self.keep = keep
        self.queue: Any = None
        self.state: Any = None
        self.events = []
        self.logs = defaultdict(bytes)

    def write(self, task, stream, data):
        if self.keep:
            self.logs[task, stream] += data

    def saw(self, event, state, now):
        if self.keep:
            self.events.append(event)
        for answer in self.react(event, state) or ():
            self.queue.put(answer)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def lines(self, task=W0, stream="stdout"):
        said = [event for event in self.of(Output) if (event.task, event.stream) == (task, stream)]
        return [line for event in said for line in event.lines]


@pytest.fixture
def run(plan_for, make_cluster):
    """Runs a command in the tasks of a cluster, as a launch does, and gives its `Outcome`."""

    def run(*command, cluster=None, shutdown=20.0, react=lambda event, state: None, keep=True, max_restarts=0):
        plan = plan_for(cluster or make_cluster(worker=1), *command)
        outcome = Outcome(react, keep=keep)

        async def whole():
            outcome.queue = EventQueue()
            outlets = Outlets(outcome.queue, outcome, lambda start: {"OWN": f"{start.task} {start.attempt}"})
            rules = Rules(plan.strategy, timeouts=Timeouts(shutdown=shutdown), max_restarts=max_restarts)
            return await run_job(LocalLauncher(), plan, rules, outlets, (outcome,))

        outcome.state = asyncio.run(whole())
        return outcome

    return run
