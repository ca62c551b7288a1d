"""What is right by the rules and yet likely to go wrong, told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfdist_cli.resources import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.resources import Size
from tfdist_cli.spec.task_id import ROLES, TaskId


@dataclass(frozen=True)
class Caution:
    """Something to think about.

    Args:
        code: what it is, in a word that programs can look for.
        message: what may go wrong and why.
        hint: what to do about it.
    """

    code: str
    message: str
    hint: str


def cautions(cluster: Cluster, machine: Machine) -> Iterator[Caution]:
    """Looks at a cluster that is about to start.

    Args:
        cluster: which tasks there are.
        machine: the one that the tasks without a host of their own run on.
    """
    yield from _public_addresses(cluster)
    if cluster.launcher == "local":
        yield from _more_than_there_is(cluster, machine)


def _public_addresses(cluster: Cluster) -> Iterator[Caution]:
    public: Mapping[TaskId, Address] = {
        task: address for task in cluster.tasks if (address := cluster.address(task)).is_public
    }
    if public:
        task, address = next(iter(public.items()))
        who = f"{task} listens on a public address, {address}"
        if len(public) > 1:
            who = f"{task} ({address}) and {len(public) - 1} more listen on public addresses"
        yield Caution(
            "exposed-port",
            f"{who}: anyone who reaches it can run any operation there, file access included, without a password",
            "use addresses of a private network or a VPN, or let a firewall pass the cluster's own hosts alone; "
            "see docs/security.md",
        )


def _more_than_there_is(cluster: Cluster, machine: Machine) -> Iterator[Caution]:
    here = [task for task in cluster.tasks if cluster.address(task).is_loopback]
    asked = sum(memory.bytes for task in here if (memory := cluster.role(task).memory))
    if machine.memory and asked > machine.memory:
        yield Caution(
            "too-much-memory",
            f"the tasks are to have {_shown(asked)} of memory, and this machine has {_shown(machine.memory)}",
            "lower memory or replicas of a role, or give tasks to other machines: where none is left, tasks are killed",
        )
    for role in ROLES:
        spec = cluster.roles.of(role)
        if spec and spec.cpus and spec.cpus > machine.cores and any(task.role == role for task in here):
            yield Caution(
                "too-many-cores",
                f"a {role} is to compute on {spec.cpus} cores, and this machine has {machine.cores}",
                f"lower roles.{role}.cpus: threads that wait for one another's core cost time",
            )


def _shown(number: int) -> str:
    """As gigabytes, to a tenth; less as it is."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else str(Size(number))
