"""Addresses of tasks where a launcher gives them names of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import DEFAULT_PORT, Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


def named_addresses(cluster: Cluster, what: str, name_of: Callable[[TaskId], str]) -> Mapping[TaskId, Address]:
    """Port 2222 of a host of its own for each task.

    Args:
        cluster: which tasks there are.
        what: what has names of its own, for the message.
        name_of: a task → its host's name.

    Raises:
        UsageError: the cluster names hosts itself.
    """
    for task in cluster.tasks:
        if cluster.role(task).hosts is not None:
            raise UsageError(
                f"roles.{task.role}.hosts names machines, but {what} have names of their own",
                hint=f"write 'replicas: {cluster.roles.count(task.role)}' in its place",
            )
    return {task: Address(name_of(task), DEFAULT_PORT) for task in cluster.tasks}
