"""Runs the tasks of a plan in actors of a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ray import driver
from tfdist_cli.launch.slots.application import Submission
from tfdist_cli.launch.slots.launcher import SlotLauncher, own_host
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.engines import RaySpec
from tfdist_cli.spec.task_id import TaskId

_START_SECONDS = 60.0
"""Seconds in which the actors start once they are placed."""


class RayLauncher(SlotLauncher):
    """Starts a driver on this machine, which asks the Ray cluster for a placement group."""

    def check_engine(self) -> None:
        """Checks for the package ray, without importing it."""
        if importlib.util.find_spec("ray") is None:
            raise UsageError(
                "the package ray is not installed",
                code="package-missing",
                hint="pip install 'tfdist-cli[ray]', in the version of your cluster",
            )

    def submission(self, cluster: Cluster) -> Submission:
        """Returns the command of the driver."""
        spec = cluster.ray or RaySpec()
        settings = {
            "address": spec.address,
            "strategy": spec.placement.upper(),
            "bundles": [bundle(cluster, task) for task in cluster.tasks],
            "seconds": spec.wait_seconds,
            "name": cluster.name,
        }

        def argv(launcher: str) -> Sequence[str]:
            return [sys.executable, "-m", driver.__name__, launcher, json.dumps(settings)]

        host = spec.launcher_address or own_host(*driver.head(spec.address))
        return Submission("Ray", argv, host, len(cluster.tasks), spec.wait_seconds + _START_SECONDS)


def bundle(cluster: Cluster, task: TaskId) -> dict[str, Any]:
    """Returns what a task's actor needs of its node."""
    spec = cluster.role(task)
    needs: dict[str, Any] = {"CPU": spec.cpus or 1}
    if isinstance(spec.gpus, int) and spec.gpus:
        needs["GPU"] = spec.gpus
    if spec.memory:
        needs["memory"] = spec.memory.bytes
    return needs
