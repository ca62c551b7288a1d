"""Which host takes which task: a pure function of the cluster file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.ssh import HostSpec
from tfdist_cli.spec.task_id import Role, TaskId

_COMPUTE: tuple[Role, ...] = ("ps", "worker", "data_worker")
_ORDER: tuple[Role, ...] = ("chief", "ps", "worker", "data_worker", "data_dispatcher", "evaluator")
"""A ps and a worker come to be on different hosts as long as there are hosts left."""


def place(cluster: Cluster) -> dict[TaskId, HostSpec]:
    """Puts each task on a host, in the order of the cluster's tasks.

    A task with an address is there. The others go where the least is to be done: one after another, to the host with
    the fewest tasks that compute for each of its slots, the first of those that are equal. The task that saves, the
    chief or worker 0, goes to the first host, and the evaluator to the same, since it reads what that one has saved.

    Raises:
        UsageError: there are no hosts for a task, or they have too few slots.
    """
    placed = {task: cluster.machine(hosts[task.index].host) for task, hosts in _written(cluster)}
    load = Counter(host.address for task, host in placed.items() if _computes(cluster, task))
    for task in sorted(cluster.tasks, key=lambda task: (_ORDER.index(task.role), task.index)):
        if task not in placed:
            placed[task] = _choose(cluster, task, placed, load)
            load[placed[task].address] += _computes(cluster, task)
    return {task: placed[task] for task in cluster.tasks}


def _written(cluster: Cluster) -> Iterator[tuple[TaskId, list[Address]]]:
    for task in cluster.tasks:
        hosts = cluster.role(task).hosts
        if hosts is not None:
            yield task, hosts


def _choose(cluster: Cluster, task: TaskId, placed: dict[TaskId, HostSpec], load: Counter[str]) -> HostSpec:
    saves = cluster.tasks[0]
    if task.role == "evaluator":
        return placed[saves]
    machines = cluster.machines
    if not machines:
        raise UsageError(
            f"{task} has no host to run on",
            hint="list the machines as 'hosts' in the cluster file, such as 'hosts: [gpu01, gpu02]'",
        )
    if task == saves:
        return machines[0]
    free = [host for host in machines if host.slots is None or load[host.address] < host.slots]
    if not _computes(cluster, task):
        free = list(machines)
    if not free:
        slots = sum(host.slots or 0 for host in machines)
        raise UsageError(
            f"there is no slot for {task}: the hosts have {slots} for tasks that compute",
            hint="add hosts, raise their slots, or lower the replicas",
        )
    return min(free, key=lambda host: (load[host.address] + 1) / (host.slots or 1))


def _computes(cluster: Cluster, task: TaskId) -> bool:
    """Whether a task takes a slot: a chief of parameter servers only tells others what to do."""
    return task.role in _COMPUTE or (task.role == "chief" and cluster.strategy != "parameter_server")
