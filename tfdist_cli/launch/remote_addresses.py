"""What launchers have in common whose tasks run where each has an address of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tfdist_cli.plan.resources import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


class RemoteAddresses(ABC):
    """Half of a launcher: nothing is reserved, and nothing of the machines is known before the tasks are there."""

    @abstractmethod
    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """The tasks' addresses, or what stands for them."""

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """As foreseen."""
        yield self.preview_addresses(cluster)

    def machines(self) -> Mapping[str, Machine]:
        """None that is known."""
        return {}
