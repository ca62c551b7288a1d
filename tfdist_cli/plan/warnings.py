"""What is right by the rules and yet likely to go wrong, told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.plan.resources import ALL_GPUS, Machine, share_out
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.resources import Size
from tfdist_cli.spec.strategies import computes_gradients
from tfdist_cli.spec.task_id import TaskId

MANY = 1000
"""Tasks of one role that are more likely a slip of the hand."""


@dataclass(frozen=True)
class PlanWarning:
    """Something to think about.

    Args:
        code: what it is, in a word that programs can look for.
        message: what may go wrong and why.
        hint: what to do about it.
    """

    code: str
    message: str
    hint: str


def warnings_of(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    """Looks at a cluster that is about to start.

    Args:
        cluster: which tasks there are.
        machine: the one that the tasks without a host of their own run on.
    """
    yield from _public_addresses(cluster)
    yield from _many_tasks(cluster)
    if cluster.launcher_traits.local_processes:
        yield from _more_than_there_is(cluster, machine)
        yield from _shared_cores(cluster, machine)
        yield from _idle_gpus(cluster, machine)


def recipe_warnings(kept: Path, recipe: Recipe | None) -> Iterator[PlanWarning]:
    """Looks at a run's directory that a launch is to go on in.

    Args:
        kept: the recipe that is kept there, if the run trained one.
        recipe: what is to be trained now; None for a program of the user's own.
    """
    try:
        before = load_recipe(kept)
    except TfdistError:  # a new directory, a program's, or one that is damaged
        return
    if recipe is None or recipe.module != before.module:
        now = f"the recipe of module {recipe.module!r}" if recipe else "a program"
        yield PlanWarning(
            "other-recipe",
            f"{kept.parent} belongs to a run of another recipe: it has trained module {before.module!r}, "
            f"and this launch runs {now}",
            "name another --run-dir: metrics and checkpoints of the two would be mixed",
        )


def _idle_gpus(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    """GPUs that nobody uses, since the tasks that share them get the same number each."""
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    with suppress(UsageError):  # the plan itself is refused then
        shares = share_out(cluster, addresses, machine)
        sharing = [task for task in shares if _trains(cluster, task) and cluster.role(task).gpus is None]
        used = {gpu for share in shares.values() for gpu in share.gpus}
        idle = [gpu for gpu in machine.gpus if gpu not in used]
        if sharing and idle and not used & set(ALL_GPUS):
            role, of_all = sharing[-1].role, f"{len(idle)} of this machine's {len(machine.gpus)} GPUs"
            yield PlanWarning(
                "idle-gpus",
                f"{of_all} stay idle: {len(sharing)} tasks share them evenly",
                f"choose a number of tasks that divides the GPUs, or name some with roles.{role}.gpus, such as [0, 1]",
            )


def _public_addresses(cluster: Cluster) -> Iterator[PlanWarning]:
    public: Mapping[TaskId, Address] = {
        task: address for task in cluster.tasks if (address := cluster.address(task)).is_public
    }
    if public:
        task, address = next(iter(public.items()))
        who = f"{task} listens on a public address, {address}"
        if len(public) > 1:
            who = f"{task} ({address}) and {len(public) - 1} more listen on public addresses"
        yield PlanWarning(
            "exposed-port",
            f"{who}: anyone who reaches it can run any operation there, file access included, without a password",
            "use addresses of a private network or a VPN, or let a firewall pass the cluster's own hosts alone; "
            "see docs/how-to/secure-ports.md",
        )


def _many_tasks(cluster: Cluster) -> Iterator[PlanWarning]:
    for role in ROLES:
        count = cluster.roles.count(role)
        if count >= MANY:
            yield PlanWarning(
                "many-tasks",
                f"there are to be {count} tasks of {role}",
                f"correct roles.{role}.replicas if that is not what you mean",
            )


def _shared_cores(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    """More tasks that compute than cores; a chief of parameter servers and those that serve leave their cores free."""
    here = [task for task in cluster.tasks if _trains(cluster, task) and cluster.address(task).is_loopback]
    if len(here) > machine.cores and not machine.gpus:
        yield PlanWarning(
            "more-tasks-than-cores",
            f"{len(here)} tasks train on this machine, which has {machine.cores} cores",
            f"run at most {machine.cores} here: those that share a core are slower together than fewer tasks",
        )


def _trains(cluster: Cluster, task: TaskId) -> bool:
    return computes_gradients(cluster.strategy, task.role)


def _more_than_there_is(cluster: Cluster, machine: Machine) -> Iterator[PlanWarning]:
    here = [task for task in cluster.tasks if cluster.address(task).is_loopback]
    asked = sum(memory.bytes for task in here if (memory := cluster.role(task).memory))
    if machine.memory and asked > machine.memory:
        yield PlanWarning(
            "too-much-memory",
            f"the tasks are to have {_shown(asked)} of memory, and this machine has {_shown(machine.memory)}",
            "lower memory or replicas of a role, or give tasks to other machines: where none is left, tasks are killed",
        )
    for role in ROLES:
        spec = cluster.roles.of(role)
        if spec and spec.cpus and spec.cpus > machine.cores and any(task.role == role for task in here):
            yield PlanWarning(
                "too-many-cores",
                f"a {role} is to compute on {spec.cpus} cores, and this machine has {machine.cores}",
                f"lower roles.{role}.cpus: threads that wait for one another's core cost time",
            )


def _shown(number: int) -> str:
    """As gigabytes, to a tenth; less as it is."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else str(Size(number))
