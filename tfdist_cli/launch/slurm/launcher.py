"""Runs the tasks of a plan as one job of Slurm's, which is followed from where it was submitted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.addresses import RemoteAddresses
from tfdist_cli.launch.slurm.commands import await_answer, check_programs
from tfdist_cli.launch.slurm.run import SlurmRun, job_of
from tfdist_cli.launch.slurm.script import SCRIPT_FILE, render_script
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

SOMEWHERE = Address("slurm", 0)
"""Stands for a node that Slurm chooses, and a port that follows from the job's number."""


class SlurmLauncher(RemoteAddresses):
    """Submits a job."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002 it is run elsewhere
        """Slurm has to be here; what the tasks need is on the nodes."""
        check_programs()

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Nothing is known: Slurm chooses the nodes.

        Raises:
            UsageError: the cluster file names hosts.
        """
        for task in cluster.tasks:
            if cluster.role(task).hosts:
                raise UsageError(
                    f"roles.{task.role}.hosts names addresses, but Slurm chooses the nodes",
                    hint=f"give roles.{task.role} replicas, and the nodes' names as slurm.extra: [--nodelist=…]",
                )
        return dict.fromkeys(cluster.tasks, SOMEWHERE)

    def render(self, plan: Plan) -> str:
        """The batch script."""
        return render_script(plan)

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[SlurmRun]:
        """A run whose job is submitted with its first task, and cancelled when it is left before its end."""
        (plan.run_dir / SCRIPT_FILE).write_text(render_script(plan) + "\n", encoding="utf-8")
        run = SlurmRun(plan, context)
        try:
            yield run
        finally:
            await run.close()


def refuse_running_job(run_dir: Path) -> None:
    """Refuses a run's directory whose job is still there: a launcher that was killed leaves it behind.

    Where Slurm is not installed nothing is known of a job.

    Raises:
        UsageError: the job waits or runs.
        TfdistError: Slurm does not answer.
    """
    name = job_of(run_dir)
    if not name or shutil.which("squeue") is None:
        return
    job = asyncio.run(await_answer(name))
    if job.is_running or job.is_pending:
        raise UsageError(
            f"job {name} of this run is still {job.state.lower()}: its launcher is gone, but it is not",
            hint=f"wait for it, or end it with `tfdist stop {run_dir}`",
        )
