"""The hosts of a cluster: their tasks, ports and folders, and the command that runs Python there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tfdist_cli.doctor import probe
from tfdist_cli.launch.ssh.command import python_command, ssh_argv
from tfdist_cli.launch.ssh.placement import place
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

HERE = "this machine"


def is_here(host: str) -> bool:
    """Whether a host name or IP address belongs to this machine."""
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return Address(host).is_loopback or bool(own.intersection(probe.resolved(host)))


@dataclass(frozen=True)
class Site:
    """A host to examine.

    Args:
        name: its name in the cluster file.
        ports: the addresses of its tasks. Port 0 is a free port that is chosen at the start. An empty host is the IP
            address of the ssh connection.
        folders: the folders that the job writes to, by purpose.
        tasks: the tasks that run there.
        ssh: the cluster, with its ssh settings, and the host; None for this machine.
    """

    name: str
    ports: Mapping[TaskId, Address] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[TaskId, ...] = ()
    ssh: tuple[Cluster, HostSpec] | None = None

    @property
    def remote(self) -> bool:
        """Whether it is another machine."""
        return self.ssh is not None

    def python(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs its tasks' Python, or any Python if none has tfdist."""
        if self.ssh is None:
            return [sys.executable, *arguments]
        return ssh_argv(*self.ssh, python_command(self.ssh[1], arguments, without_tfdist=True))


def sites_of(cluster: Cluster | None, recipe: Recipe | None, runs: str) -> tuple[Site, ...]:
    """Returns the hosts of a cluster. This machine is the first, even without tasks.

    Args:
        cluster: the cluster; None for this machine only.
        recipe: the recipe, which may name a checkpoint folder.
        runs: the folder of run directories on this machine.

    Raises:
        UsageError: the ssh launcher has no host for a task.
    """
    if cluster is None:
        return (Site(HERE, folders={"run directories": runs}),)
    hosts: dict[HostSpec | None, list[TaskId]] = {None: []}
    for task, host in _placed(cluster).items():
        hosts.setdefault(host, []).append(task)
    return tuple(_site(cluster, recipe, host, tuple(tasks), runs) for host, tasks in hosts.items())


def _placed(cluster: Cluster) -> dict[TaskId, HostSpec | None]:
    """Returns the host of each task; None for this machine. A scheduler or an image has tasks that are on neither."""
    traits = cluster.launcher_traits
    if traits.uses_hosts:
        return dict(place(cluster))
    if not traits.local_processes and not any(cluster.role(task).hosts for task in cluster.tasks):
        return {}
    names = {cluster.address(task).host for task in cluster.tasks}
    machines = {name: None if is_here(name) else cluster.machine(name) for name in names}
    return {task: machines[cluster.address(task).host] for task in cluster.tasks}


def _site(cluster: Cluster, recipe: Recipe | None, host: HostSpec | None, tasks: tuple[TaskId, ...], runs: str) -> Site:
    name = host.address if host else HERE
    ports = {task: _address(cluster, task, host) for task in tasks if task.traits.listens}
    saves = next((task for task in cluster.tasks if task.traits.trains), None)
    writes = not host or any(task == saves or task.traits.evaluates for task in tasks)
    folders = {"run directories": _runs(cluster, host, runs)} if writes or cluster.launcher_traits.uses_hosts else {}
    own = recipe.checkpoint.dir if recipe and recipe.checkpoint else None
    if isinstance(own, Path) and tasks and writes:
        folders["checkpoints"] = str(own)
    ssh = (cluster, host) if host else None
    return Site(name, ports, folders, tasks, ssh)


def _address(cluster: Cluster, task: TaskId, host: HostSpec | None) -> Address:
    if host is None or cluster.role(task).hosts:
        return cluster.address(task)
    return Address(host.reachable_as or "", 0)


def _runs(cluster: Cluster, host: HostSpec | None, runs: str) -> str:
    """Returns the folder of run directories on a host."""
    if cluster.launcher_traits.uses_hosts and host and not cluster.over_ssh.shared:
        return cluster.over_ssh.run_dir or "~/.tfdist/runs"
    return str(cluster.local_runs) if cluster.local_runs else runs if not host or cluster.over_ssh.shared else "~"
