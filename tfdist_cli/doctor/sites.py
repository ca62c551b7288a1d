"""Where a cluster's tasks run: its hosts, what each is to have, and the command that runs Python there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from tfdist_cli.doctor import probe
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

HERE = "this machine"
NO_PYTHON = 113
"""What the shell on a host ends with when it finds no Python."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes", "-o", "RequestTTY=no")


def is_here(host: str) -> bool:
    """Whether a host's name or IP address means this machine."""
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return Address(host).is_loopback or bool(own.intersection(probe.resolved(host)))


@dataclass(frozen=True)
class Site:
    """A host, as the doctor is to look at it.

    Args:
        name: what the cluster file calls it.
        remote: whether it is reached by ssh.
        ports: where its tasks listen; 0 is a free port, chosen at the start.
        folders: what is to be written to there, and for what.
        tasks: the tasks that run there.
    """

    name: str
    remote: bool = False
    ports: Mapping[TaskId, Address] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[TaskId, ...] = ()

    def python(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs a Python there."""
        if not self.remote:
            return [sys.executable, *arguments]
        return [*_SSH, "--", self.name, _first_python((sys.executable, "python3"), arguments)]


def sites_of(cluster: Cluster | None, recipe: Recipe | None, runs: str) -> tuple[Site, ...]:
    """The hosts of a cluster, this machine first; it has no tasks when all of them run elsewhere.

    Args:
        cluster: which tasks there are, and where; None for this machine alone.
        recipe: what they train, which may name a folder for checkpoints.
        runs: the folder of run directories here.
    """
    if cluster is None:
        return (Site(HERE, folders={"run directories": runs}),)
    hosts: dict[str, list[TaskId]] = {HERE: []}
    known: dict[str, bool] = {}
    for task in cluster.tasks:
        host = cluster.address(task).host
        if host not in known:
            known[host] = is_here(host)
        hosts.setdefault(HERE if known[host] else host, []).append(task)
    return tuple(_site(cluster, recipe, name, tuple(tasks), runs) for name, tasks in hosts.items())


def _site(cluster: Cluster, recipe: Recipe | None, name: str, tasks: tuple[TaskId, ...], runs: str) -> Site:
    ports = {task: cluster.address(task) for task in tasks if task.role != "evaluator"}
    folders = {}
    saves = next((task for task in cluster.tasks if task.role in ("chief", "worker")), None)
    if name == HERE or any(task in (saves, TaskId("evaluator")) for task in tasks):
        given = cluster.run_dir and str(cluster.run_dir)
        folders["run directories"] = given or (runs if name == HERE else "~")
        if recipe and recipe.checkpoint and recipe.checkpoint.dir and tasks:
            folders["checkpoints"] = str(recipe.checkpoint.dir)
    return Site(name, name != HERE, ports, folders, tasks)


def _first_python(pythons: Sequence[str], arguments: Sequence[str]) -> str:
    """A shell command that runs the first Python that there is, whichever shell the user has there."""
    tried = shlex.join(pythons)
    script = (
        f'for python in {tried}; do command -v "$python" >/dev/null 2>&1 && exec "$python" {shlex.join(arguments)}; '
        f"done; exit {NO_PYTHON}"
    )
    return f"exec sh -c {shlex.quote(script)}"
