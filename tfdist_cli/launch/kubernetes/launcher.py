"""Renders a plan as Kubernetes objects, and runs it as pods."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.addresses import RemoteAddresses, named_addresses
from tfdist_cli.launch.documents import to_yaml
from tfdist_cli.launch.kubernetes.manifests import host_name, manifests
from tfdist_cli.launch.kubernetes.run import PodsRun
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.kubernetes import Kubernetes
from tfdist_cli.spec.task_id import TaskId


class KubernetesLauncher(RemoteAddresses):
    """Renders all kinds of Kubernetes jobs, and starts the kind `pods`."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002
        """Checks that the kind is `pods`, and that kubectl reaches a cluster."""
        kind = (cluster.kubernetes or Kubernetes()).kind
        if kind != "pods":
            raise UsageError(
                f"`launch` does not start a {kind}: Kubernetes starts and restarts its pods",
                code="kind-not-launchable",
                hint="`tfdist render CLUSTER --to kubernetes --output job.yaml`, then `kubectl apply --server-side -f "
                "job.yaml`; or --set kubernetes.kind=pods, which `launch` starts",
            )
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise UsageError(
                "kubectl is not on PATH",
                code="program-not-found",
                hint="install it, and configure access to your cluster",
            )
        called = subprocess.run(
            [kubectl, "version", "--request-timeout=10s"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if called.returncode:
            reason = (called.stderr.strip().splitlines() or ["no message"])[-1]
            raise UsageError(
                f"kubectl cannot reach a cluster: {reason}",
                code="kubernetes-unreachable",
                hint="set KUBECONFIG, or run `kubectl config use-context`",
            )

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Returns the pods' names in the DNS of the Kubernetes cluster."""
        return named_addresses(cluster, "pods", lambda task: host_name(cluster, task))

    def render(self, plan: Plan) -> str:
        """Returns the manifests, as one file for kubectl."""
        return to_yaml(manifests(plan))

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[PodsRun]:
        """Yields a run of pods, which are deleted even when the launcher is killed."""
        run = PodsRun(plan, context)
        try:
            await run.open()
            yield run
        finally:
            await run.close()
