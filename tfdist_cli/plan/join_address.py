"""Where the chief takes workers that join a running training: an address that follows from those of the tasks."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.launchers import LAUNCHERS
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.strategies import joins_cluster
from tfdist_cli.spec.task_id import TaskId


def join_address(cluster: Cluster, addresses: Mapping[TaskId, Address]) -> Address | None:
    """Returns the chief's host, with the first port after the chief's that is no task's; None if no worker can join.

    Every process computes the same address. Some launchers cannot start a task beside running ones.

    Args:
        cluster: the cluster.
        addresses: the address of every task, and of those that may join. Port 0 stands for one that is not chosen yet.
    """
    if not LAUNCHERS[cluster.launcher].tasks_join or not any(
        joins_cluster(cluster.strategy, task.role) for task in addresses
    ):
        return None
    chief = next(address for task, address in addresses.items() if task.traits.drives)
    taken = {address.port for address in addresses.values()}
    after = (port for port in range(chief.port + 1, 65536) if port not in taken)
    return Address(chief.host, next(after, 0) if chief.port else 0)
