"""Places tasks on hosts: a pure function of the cluster file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.strategies import core_use
from tfdist_cli.spec.task_id import TaskId


def place(cluster: Cluster) -> dict[TaskId, HostSpec]:
    """Returns the host of each task, and of each that may join, in the order of the cluster's possible tasks.

    The tasks that may join are placed last, so that they change nothing for the others.

    A task with an address runs on that host. Each other task is placed on the host with the fewest computing tasks per
    weight, among the hosts that have a slot, the cores and the GPUs that it needs; the first of equal hosts is chosen.
    The task that saves checkpoints, the chief or worker 0, is placed on the first host, and the evaluator beside it,
    because it reads the checkpoints.

    Raises:
        UsageError: the cluster file lists no hosts, or they have too few slots, cores or GPUs.
    """
    placed = {task: cluster.machine(hosts[task.index].host) for task, hosts in _tasks_with_addresses(cluster)}
    taken: Counter[tuple[str, str]] = Counter()
    for task, host in placed.items():
        taken.update(_needs_on(cluster, task, host))
    for task in sorted(cluster.possible_tasks, key=lambda task: (task not in cluster.tasks, _placed_first(task))):
        if task not in placed:
            placed[task] = _choose(cluster, task, placed, taken)
            taken.update(_needs_on(cluster, task, placed[task]))
    return {task: placed[task] for task in cluster.possible_tasks}


def _placed_first(task: TaskId) -> tuple[bool | int, ...]:
    """Returns the sort key of placement: ps before workers, so that they get different hosts while some are free."""
    traits = task.traits
    rank = (traits.drives, traits.holds_variables, traits.trains, traits.prepares_data, not traits.evaluates)
    return (*(not first for first in rank), task.index)


def _tasks_with_addresses(cluster: Cluster) -> Iterator[tuple[TaskId, list[Address]]]:
    for task in cluster.possible_tasks:
        hosts = cluster.role(task).hosts
        if hosts is not None:
            yield task, hosts


def _choose(
    cluster: Cluster, task: TaskId, placed: Mapping[TaskId, HostSpec], taken: Counter[tuple[str, str]]
) -> HostSpec:
    saves = cluster.tasks[0]
    if task.traits.evaluates:
        return placed[saves]
    machines = cluster.machines
    if not machines:
        raise UsageError(
            f"{task} has no host to run on",
            code="no-hosts",
            hint="list the machines as 'hosts' in the cluster file, such as 'hosts: [gpu01, gpu02]'",
        )
    for kind, wanted in _needs(cluster, task).items():
        bounds = {host.address: getattr(host, kind) for host in machines}
        machines = tuple(host for host in machines if _fits(bounds[host.address], taken[host.address, kind] + wanted))
        if not machines:
            raise _no_capacity(task, kind, wanted, bounds, taken)
    if task == saves:
        return machines[0]
    return min(machines, key=lambda host: (taken[host.address, "slots"] + 1) / (host.slots or host.cpus or 1))


def _fits(bound: int | None, taken: int) -> bool:
    return bound is None or taken <= bound


def _no_capacity(
    task: TaskId, kind: str, wanted: int, bounds: Mapping[str, int], taken: Counter[tuple[str, str]]
) -> UsageError:
    if kind == "slots":
        return UsageError(
            f"no slot is left for {task}: the hosts have {sum(bounds.values())} slots for computing tasks",
            code="no-slot-left",
            hint="add hosts, raise their slots, or lower the replicas",
        )
    free = ", ".join(f"{host} {bound - taken[host, kind]} of {bound}" for host, bound in bounds.items())
    return UsageError(
        f"{task} needs {wanted} {kind}, and no host has as many left: {free}",
        code="host-capacity-exceeded",
        hint=f"add hosts, lower roles.{task.role}.{kind} or the replicas, or correct the {kind} of the hosts",
    )


def _needs(cluster: Cluster, task: TaskId) -> dict[str, int]:
    """Returns the slots, cores and GPUs that a task needs of its host, without those that are 0."""
    spec = cluster.role(task)
    gpus = len(spec.gpus) if isinstance(spec.gpus, list) else spec.gpus if isinstance(spec.gpus, int) else 0
    needs = {"slots": int(_computes(cluster, task)), "cpus": spec.cpus or 0, "gpus": gpus}
    return {kind: number for kind, number in needs.items() if number}


def _needs_on(cluster: Cluster, task: TaskId, host: HostSpec) -> dict[tuple[str, str], int]:
    return {(host.address, kind): number for kind, number in _needs(cluster, task).items()}


def _computes(cluster: Cluster, task: TaskId) -> bool:
    """Whether a task needs a slot. A chief of parameter servers does not: it only coordinates."""
    return bool(core_use(cluster.strategy, task.role))
