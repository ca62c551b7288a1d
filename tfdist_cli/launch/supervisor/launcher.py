"""The interface of a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from tfdist_cli.launch.supervisor.events import Action, EventQueue, Output, Start, Stream
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.masking import Mask
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


class Run(Protocol):
    """The tasks of a started plan."""

    def act(self, action: Action) -> None:
        """Carries out an action; its effects arrive as events."""

    def follow(self, plan: Plan) -> None:
        """Replaces the plan while tasks run: those that start from now on follow the new one.

        Only the runs of launchers whose trait `tasks_join` is set are asked to.
        """


class Logs(Protocol):
    """Stores the output of tasks."""

    def write(self, task: TaskId, stream: Stream, data: bytes) -> None:
        """Appends to a task's log."""


@dataclass(frozen=True)
class LaunchContext:
    """What a launcher gets to run tasks.

    Args:
        events: the queue that takes the events of the tasks.
        logs: stores all output, byte for byte but without records.
        prepare: called before a task starts; returns variables for its environment, beside those of the plan.
        mask: removes secrets from the tasks' output.
    """

    events: EventQueue
    logs: Logs
    prepare: Callable[[Start], Mapping[str, str]]
    mask: Mask = field(default_factory=Mask)

    async def add_line(self, task: TaskId, text: str) -> None:
        """Adds a line to a task's standard error: in its log, and on the terminal."""
        line = f"tfdist: {text}"
        self.logs.write(task, "stderr", f"{line}\n".encode())
        await self.events.put_output(Output(task, "stderr", (line,)))


class Launcher(Protocol):
    """Runs tasks on one kind of platform."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Checks what every task needs, before anything is reserved or started.

        Args:
            cluster: the cluster.
            command: a user's program; empty if the tasks train a recipe.

        Raises:
            UsageError: something is missing.
        """

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """The tasks' addresses as far as they are known before the start; port 0 stands for one that is chosen then."""

    def reserve(self, cluster: Cluster) -> AbstractContextManager[Mapping[TaskId, Address]]:
        """A free address for each task, reserved until the context is left.

        Raises:
            UsageError: a task cannot run at its configured address.
        """

    def machines(self) -> Mapping[str, Machine]:
        """The resources of remote machines, by the hosts of the tasks' addresses, as far as known after `reserve`."""

    def render(self, plan: Plan) -> str:
        """The commands or manifests of `start`, as text that a user can read and run by hand."""

    def start(self, plan: Plan, context: LaunchContext) -> AbstractAsyncContextManager[Run]:
        """A run of the plan. No task is started yet. The tasks still alive when the context is left are killed."""
