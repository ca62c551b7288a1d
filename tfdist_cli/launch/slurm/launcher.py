"""Runs the tasks of a plan as one Slurm job, which is followed from the machine that submits it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tfdist_cli.launch.addresses import RemoteAddresses, unknown_addresses
from tfdist_cli.launch.slurm.commands import check_programs
from tfdist_cli.launch.slurm.run import SlurmRun
from tfdist_cli.launch.slurm.script import render_script
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId


class SlurmLauncher(RemoteAddresses):
    """Submits a plan as a job."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002 the nodes run it
        """Checks that Slurm's programs are on this machine. The nodes cannot be checked."""
        check_programs()

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Returns placeholders: Slurm chooses the nodes.

        Raises:
            UsageError: the cluster file names hosts.
        """
        hint = ", and the nodes' names as slurm.extra: [--nodelist=…]"
        return unknown_addresses(cluster, cluster.possible_tasks, "Slurm", hint)

    def render(self, plan: Plan) -> str:
        """Returns the batch script."""
        return render_script(plan)

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[SlurmRun]:
        """Yields a run, which submits its job when the tasks start. A job that is not over at the exit is cancelled."""
        run = SlurmRun(plan, context)
        try:
            yield run
        finally:
            await run.close()
