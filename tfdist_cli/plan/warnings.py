"""Warnings about a valid cluster that is likely to fail or to be slow. They are printed before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.resources import ALL_GPUS, allocate
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.resources import Size
from tfdist_cli.spec.strategies import computes_gradients
from tfdist_cli.spec.task_id import TaskId

MANY = 1000
"""Number of tasks of one role from which on a typo is more likely."""


@dataclass(frozen=True)
class PlanWarning:
    """A likely problem.

    Args:
        code: the stable name of the problem; see `TfdistError`.
        message: what may go wrong, and why.
        hint: what to do about it.
    """

    code: str
    message: str
    hint: str


def warnings_of(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    """Yields the warnings about a cluster.

    Args:
        cluster: the cluster.
        machine: this machine, which runs the tasks without `hosts`.
    """
    yield from _public_addresses(cluster)
    yield from _many_tasks(cluster)
    if cluster.launcher_traits.local_processes:
        yield from _resources_exceeded(cluster, machine)
        yield from _shared_cores(cluster, machine)
        yield from _idle_gpus(cluster, machine)


def recipe_warnings(kept: Path, recipe: Recipe | None) -> Iterator[PlanWarning]:
    """Yields the warnings about a run directory that a launch continues.

    Args:
        kept: the recipe file in the run directory. It exists if the run trained a recipe.
        recipe: the recipe of this launch; None for a user's program.
    """
    try:
        before = load_recipe(kept)
    except TfdistError:  # the directory is new or damaged, or its run was a program
        return
    if recipe is None or recipe.module != before.module:
        now = f"the recipe of module {recipe.module!r}" if recipe else "a program"
        yield PlanWarning(
            code="other-recipe",
            message=f"{kept.parent} belongs to a run of another recipe: it trained module {before.module!r}, "
            f"and this launch runs {now}",
            hint="use another --run-dir: the metrics and checkpoints of the two runs would be mixed",
        )


def _idle_gpus(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    """GPUs that no task uses, since the tasks that share them get the same number each."""
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    with suppress(UsageError):  # planning reports it
        allocated = allocate(cluster, addresses, machine)
        sharing = [task for task in allocated if _trains(cluster, task) and cluster.role(task).gpus is None]
        used = {gpu for resources in allocated.values() for gpu in resources.gpus}
        idle = [gpu for gpu in machine.gpus if gpu not in used]
        if sharing and idle and not used & set(ALL_GPUS):
            role, of_all = sharing[-1].role, f"{len(idle)} of this machine's {len(machine.gpus)} GPUs"
            yield PlanWarning(
                code="idle-gpus",
                message=f"{of_all} are not used: {len(sharing)} tasks share the GPUs equally",
                hint=f"use a number of tasks that divides the GPUs, or set roles.{role}.gpus, such as [0, 1]",
            )


def _public_addresses(cluster: Cluster) -> Iterator[PlanWarning]:
    public: Mapping[TaskId, Address] = {
        task: address for task in cluster.tasks if (address := cluster.address(task)).is_public
    }
    if public:
        task, address = next(iter(public.items()))
        listening = f"{task} listens on a public address, {address}"
        if len(public) > 1:
            listening = f"{task} ({address}) and {len(public) - 1} more tasks listen on public addresses"
        yield PlanWarning(
            code="exposed-port",
            message=f"{listening}: anyone who can connect to it can run any operation there without a password, and "
            "read and write files",
            hint="use addresses of a private network or a VPN, or restrict the ports to the cluster's hosts by a "
            "firewall; see docs/how-to/secure-ports.md",
        )


def _many_tasks(cluster: Cluster) -> Iterator[PlanWarning]:
    for role in ROLES:
        count = cluster.roles.count(role)
        if count >= MANY:
            yield PlanWarning(
                code="many-tasks",
                message=f"{role} has {count} tasks",
                hint=f"correct roles.{role}.replicas if the number is a typo",
            )


def _shared_cores(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    """More tasks that compute gradients than cores. Other tasks rarely compute at the same time."""
    here = [task for task in cluster.tasks if _trains(cluster, task) and cluster.address(task).is_loopback]
    if len(here) > machine.cores and not machine.gpus:
        yield PlanWarning(
            code="more-tasks-than-cores",
            message=f"{len(here)} tasks train on this machine, which has {machine.cores} cores",
            hint=f"run at most {machine.cores} tasks here: tasks that share a core are slower than fewer tasks",
        )


def _trains(cluster: Cluster, task: TaskId) -> bool:
    return computes_gradients(cluster.strategy, task.role)


def _resources_exceeded(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    here = [task for task in cluster.tasks if cluster.address(task).is_loopback]
    asked = sum(memory.bytes for task in here if (memory := cluster.role(task).memory))
    if machine.memory and asked > machine.memory:
        yield PlanWarning(
            code="too-much-memory",
            message=f"the tasks ask for {_shown(asked)} of memory, and this machine has {_shown(machine.memory)}",
            hint="lower memory or replicas of a role, or use more machines: if memory runs out, tasks are killed",
        )
    for role in ROLES:
        spec = cluster.roles.of(role)
        if spec and spec.cpus and spec.cpus > machine.cores and any(task.role == role for task in here):
            yield PlanWarning(
                code="too-many-cores",
                message=f"a {role} asks for {spec.cpus} cores, and this machine has {machine.cores}",
                hint=f"lower roles.{role}.cpus: more threads than cores slow the task down",
            )


def _shown(number: int) -> str:
    """The number of bytes in GiB with one decimal, or exactly below 1 GiB."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else str(Size(number))
