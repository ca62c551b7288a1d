"""Writes the tasks of a plan as pods, which kubectl starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import NoReturn

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.base import Outlets, Run
from tfdist_cli.launch.documents import to_yaml
from tfdist_cli.launch.kubernetes.manifests import host_name, manifests
from tfdist_cli.launch.named import named_addresses
from tfdist_cli.plan import Plan
from tfdist_cli.resources import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


class KubernetesLauncher:
    """Renders for a Kubernetes cluster, which starts, watches and restarts the pods itself."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002
        """There is nothing that a launcher would do beside Kubernetes."""
        _refuse()

    def foresee(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Each pod has a name of its own in the cluster's DNS, and its own ports."""
        return named_addresses(cluster, "pods", lambda task: host_name(cluster, task))

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """A pod's address is its own, so that there is nothing to reserve."""
        yield self.foresee(cluster)

    def machines(self) -> Mapping[str, Machine]:
        """None that is known."""
        return {}

    def render(self, plan: Plan) -> str:
        """The manifests, as one file for kubectl."""
        return to_yaml(manifests(plan))

    def start(self, plan: Plan, outlets: Outlets) -> AbstractAsyncContextManager[Run]:  # noqa: ARG002
        """Refused, as by `check`."""
        _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "a cluster on Kubernetes is not started by `launch`: Kubernetes runs its pods, and starts lost ones again",
        hint="`tfdist render CLUSTER --to kubernetes --output job.yaml`, then `kubectl apply -f job.yaml`",
    )
