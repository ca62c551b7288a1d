"""Renders the tasks of a plan for Kubernetes, and runs them there as pods."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.addresses import RemoteAddresses, named_addresses
from tfdist_cli.launch.kubernetes.manifests import host_name, manifests
from tfdist_cli.launch.kubernetes.run import PodsRun
from tfdist_cli.launch.run.documents import to_yaml
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.kubernetes import Kubernetes
from tfdist_cli.spec.task_id import TaskId


class KubernetesLauncher(RemoteAddresses):
    """Renders for a Kubernetes cluster; of the kinds of job there, it starts `pods`."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002
        """Pods alone are run by a launcher, and kubectl has to reach a cluster."""
        kind = (cluster.kubernetes or Kubernetes()).kind
        if kind != "pods":
            raise UsageError(
                f"a {kind} is not started by `launch`: Kubernetes runs its pods, and starts lost ones again",
                hint="`tfdist render CLUSTER --to kubernetes --output job.yaml`, then `kubectl apply -f job.yaml`; or "
                "--set kubernetes.kind=pods, which `launch` runs itself",
            )
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise UsageError("there is no kubectl on PATH", hint="install it, and let it know your cluster")
        called = subprocess.run(
            [kubectl, "version", "--request-timeout=10s"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if called.returncode:
            said = (called.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise UsageError(
                f"kubectl reaches no cluster: {said}", hint="set KUBECONFIG, or `kubectl config use-context`"
            )

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Each pod has a name of its own in the cluster's DNS, and its own ports."""
        return named_addresses(cluster, "pods", lambda task: host_name(cluster, task))

    def render(self, plan: Plan) -> str:
        """The manifests, as one file for kubectl."""
        return to_yaml(manifests(plan))

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[PodsRun]:
        """A run of pods, which are deleted when the launcher ends, also when it is killed."""
        run = PodsRun(plan, context)
        try:
            await run.open()
            yield run
        finally:
            await run.close()
