"""Addresses of tasks on machines where this process can reserve no ports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.spec.address import DEFAULT_PORT, Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


class RemoteAddresses(ABC):
    """Base of launchers that reserve no ports, and learn nothing of other machines before the tasks start."""

    @abstractmethod
    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Returns the tasks' addresses, or placeholders for them."""

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """Yields the previewed addresses."""
        yield self.preview_addresses(cluster)

    def machines(self) -> Mapping[str, Machine]:
        """Returns no machines: none is known."""
        return {}


def unknown_addresses(
    cluster: Cluster, tasks: Iterable[TaskId], scheduler: str, hint: str = ""
) -> Mapping[TaskId, Address]:
    """Returns placeholders for the addresses of tasks: the scheduler chooses the hosts.

    Args:
        cluster: the cluster.
        tasks: its tasks that get a placeholder.
        scheduler: its name in the message.
        hint: how users choose the hosts there.

    Raises:
        UsageError: the cluster file names hosts.
    """
    for task in cluster.tasks:
        if cluster.role(task).hosts is not None:
            raise UsageError(
                f"roles.{task.role}.hosts names addresses, but {scheduler} chooses the hosts",
                code="hosts-not-supported",
                hint=f"give roles.{task.role} replicas{hint}",
            )
    return dict.fromkeys(tasks, Address(cluster.launcher, 0))


def named_addresses(cluster: Cluster, what: str, host_of: Callable[[TaskId], str]) -> Mapping[TaskId, Address]:
    """Returns port 2222 of a separate host for each task.

    Args:
        cluster: the tasks.
        what: the kind of host, in the plural, for the message.
        host_of: maps a task to its host name.

    Raises:
        UsageError: the cluster file names hosts.
    """
    for task in cluster.tasks:
        if cluster.role(task).hosts is not None:
            raise UsageError(
                f"roles.{task.role}.hosts names machines, but {what} have host names of their own",
                code="hosts-not-supported",
                hint=f"write 'replicas: {cluster.roles.count(task.role)}' in its place",
            )
    return {task: Address(host_of(task), DEFAULT_PORT) for task in cluster.possible_tasks}
