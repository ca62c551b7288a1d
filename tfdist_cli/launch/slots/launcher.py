"""The base of launchers whose tasks run in the slots of an engine."""

from __future__ import annotations

import shlex
import socket
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tfdist_cli.launch.addresses import RemoteAddresses, unknown_addresses
from tfdist_cli.launch.local.launcher import assignments
from tfdist_cli.launch.slots.application import Submission
from tfdist_cli.launch.slots.fleet import Fleet
from tfdist_cli.launch.ssh.paths import PathMap, files_at, task_at
from tfdist_cli.launch.ssh.run import HostRun, SshRun
from tfdist_cli.launch.ssh.versions import compare, installed
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.machine import NO_PROXY, Machine
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

_ANYWHERE = "198.51.100.1"
"""An address that no network has: only the route to it is asked for."""
UNKNOWN_LAUNCHER = "LAUNCHER:PORT"
"""The placeholder for the address to which slots connect."""


class SlotLauncher(RemoteAddresses):
    """Runs each task in a slot of an engine. Paths are the same on all hosts, as on a shared file system."""

    def __init__(self) -> None:
        self._trains = True
        self._fleet: Fleet | None = None

    @abstractmethod
    def submission(self, cluster: Cluster) -> Submission:
        """Returns how the engine's application is started."""

    @abstractmethod
    def check_engine(self) -> None:
        """Checks that the engine's programs are on this machine.

        Raises:
            UsageError: they are not.
        """

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Checks the engine's programs, and that no task has an address."""
        self._trains = not command
        self.preview_addresses(cluster)
        self.check_engine()

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Returns placeholders: the engine chooses the hosts.

        Raises:
            UsageError: the cluster file names hosts.
        """
        return unknown_addresses(cluster, cluster.tasks, cluster.launcher)

    def machines(self) -> Mapping[str, Machine]:
        """Returns the resources of the slots' hosts, as their agents report them.

        An engine may show each slot other GPUs: a host has those of all its slots. Tasks are not bound to cores, which
        other applications of the engine use as well.
        """
        found: dict[str, Machine] = {}
        if self._fleet is None:
            return found
        for task, hello in self._fleet.hellos.items():
            host = self._fleet.addresses[task].host
            gpus = dict.fromkeys((*(found[host].gpus if host in found else ()), *hello.machine.gpus))
            found[host] = replace(hello.machine, gpus=tuple(gpus), core_ids=())
        return found

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """Starts the application, and reserves a port for each task in its slot.

        Raises:
            UsageError: versions differ, or the application cannot run as it is configured.
            HostLost: the application has ended, or the slots have not come up in time.
        """
        fleet = Fleet(self.submission(cluster), cluster.tasks)
        try:
            fleet.open()
            versions = {f"the slot of {task}": hello.versions for task, hello in fleet.hellos.items()}
            compare(versions, installed(), trains=self._trains, same=True)
            self._fleet = fleet
            yield fleet.addresses
        finally:
            fleet.close()

    def render(self, plan: Plan) -> str:
        """Returns the command that asks for the slots, and the commands that their agents run."""
        submission = self.submission(plan.cluster)
        lines = [shlex.join(submission.argv(UNKNOWN_LAUNCHER))]
        lines += [f"# the driver sets {name} to {spec.source}" for name, spec in submission.secrets.items()]
        for slot, planned in enumerate(plan.tasks):
            given = assignments(planned.env, planned.secrets)
            lines += [f"# slot {slot}: {planned.task}", " ".join(("env", *given, shlex.join(planned.argv)))]
        return "\n".join(lines)

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[SshRun]:
        """Yields a run in the slots."""
        if self._fleet is None:
            raise RuntimeError("the slots are not reserved")
        run = SshRun(plan, context, [_host_run(plan, task, self._fleet) for task in plan.cluster.tasks])
        try:
            yield run
        finally:
            self._fleet.stop_starting()
            await run.close()


def own_host(towards: str, port: int = 1) -> str:
    """Returns the address of this machine from which another one is reached.

    Args:
        towards: the other machine; empty for any that the default route leads to.
        port: any port there: nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards or _ANYWHERE, port))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def placed(task: Mapping[str, Any], gpus: Sequence[str], hosts: Sequence[str]) -> dict[str, Any]:
    """Returns a task as its slot starts it: an application that replaces a lost one has other GPUs and hosts.

    Args:
        task: the task, of the first application.
        gpus: the GPUs that the engine shows the slot.
        hosts: those of all slots, between which there is no proxy.
    """
    env = dict(task["env"])
    for name in NO_PROXY:
        env[name] = ",".join(dict.fromkeys((*filter(None, env.get(name, "").split(",")), *hosts)))
    if not gpus or len(task["gpus"]) != len(gpus) or "all" in task["gpus"]:
        return {**task, "env": env}
    return {**task, "gpus": list(gpus), "env": {**env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}}


def _host_run(plan: Plan, task: TaskId, fleet: Fleet) -> HostRun:
    paths = PathMap((), str(Path.cwd()))
    python = fleet.hellos[task].python

    def agent_plan(plan: Plan) -> dict[str, Any]:
        part = {
            "run_dir": str(plan.run_dir),
            "files": files_at(plan, paths),
            "tasks": [placed(task_at(plan[task], paths, python), fleet.hellos[task].machine.gpus, fleet.hosts)],
            "start": paths.start,
            "copied": False,
            "tells_metrics": False,
        }
        return dict(fleet.translated(part))

    link = fleet.link(task)
    saves = task == plan.tasks[0].task
    return HostRun(link.name, link, partial(fleet.link, task), paths, agent_plan, (task,), saves)
