"""What every launcher is: one module behind these few calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from tfdist_cli.launch.supervisor.events import Action, EventQueue, Start, Stream
from tfdist_cli.plan.plan import Plan
from tfdist_cli.plan.resources import Machine
from tfdist_cli.protocol.masking import Mask
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


class Run(Protocol):
    """Tasks that are being started, watched and ended."""

    def act(self, action: Action) -> None:
        """Carries out one action; what comes of it is heard on the queue."""


class Logs(Protocol):
    """Where the output of tasks is kept."""

    def write(self, task: TaskId, stream: Stream, data: bytes) -> None:
        """Adds to a task's log."""


@dataclass(frozen=True)
class Outlets:
    """Where a run's news goes.

    Args:
        events: the queue of the loop that acts.
        logs: keeps all output, byte for byte but without records.
        prepare: called before a task is started; gives the variables that it gets on top of those of its plan.
        mask: takes secrets out of what tasks write.
    """

    events: EventQueue
    logs: Logs
    prepare: Callable[[Start], Mapping[str, str]]
    mask: Mask = field(default_factory=Mask)


class Launcher(Protocol):
    """A way to run tasks somewhere."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Refuses what every task would fail of, before anything is reserved or started.

        Args:
            cluster: which tasks there are to be.
            command: a user's own program; empty when the tasks train a recipe.

        Raises:
            UsageError: something is missing.
        """

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """The tasks' addresses as far as they are known before the start; a port that is chosen then is 0."""

    def reserve(self, cluster: Cluster) -> AbstractContextManager[Mapping[TaskId, Address]]:
        """An address for each task, free and kept for it until the context is left.

        Raises:
            UsageError: a task cannot run where the cluster wants it.
        """

    def machines(self) -> Mapping[str, Machine]:
        """What other machines have, by the hosts of the tasks' addresses, as far as it is known after `reserve`."""

    def render(self, plan: Plan) -> str:
        """What `start` would do, as text a user can read and run by hand."""

    def start(self, plan: Plan, outlets: Outlets) -> AbstractAsyncContextManager[Run]:
        """A run of the plan, with no task started yet; whatever of it is alive when the context is left is killed."""
