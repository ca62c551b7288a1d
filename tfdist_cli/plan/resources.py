"""Allocates the cores and GPUs of machines to the tasks that run on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from operator import gt
from types import MappingProxyType
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.resources import MIN_INTER_OP_THREADS, GpuMemory, Size
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.strategies import computes_gradients, core_use
from tfdist_cli.spec.task_id import TaskId

ALL_GPUS = ("all",)
"""Stands for all GPUs that a task's process sees without a restriction."""
_THIS_MACHINE = ""
"""The key of this machine among the hosts. It may have several names."""


@dataclass(frozen=True)
class Resources:
    """The resources of one task.

    Args:
        intra_op_threads: threads that compute one operation. None: one for each core of a machine that is not known
            when the plan is made.
        inter_op_threads: operations that run at the same time. None: it follows from the same machine.
        gpus: the IDs of the GPUs that the task sees, or `ALL_GPUS`.
        gpu_memory: the memory that it allocates on each GPU. None: nearly all of it, the default of TensorFlow.
        cpus: the cores that the file gives to it; None when it shares the machine's cores.
        memory: the memory that the file gives to it.
        cores: the IDs of the cores that its threads stay on; empty when they may use all.
    """

    intra_op_threads: int | None
    inter_op_threads: int | None
    gpus: tuple[str, ...] = ()
    gpu_memory: GpuMemory | None = None
    cpus: int | None = None
    memory: Size | None = None
    cores: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the resources in plain JSON types. Amounts of memory are text, as in a cluster file."""
        return {
            "intra_op_threads": self.intra_op_threads,
            "inter_op_threads": self.inter_op_threads,
            "cpus": self.cpus,
            "memory": None if self.memory is None else str(self.memory),
            "gpus": list(self.gpus),
            "gpu_memory": str(self.gpu_memory) if isinstance(self.gpu_memory, Size) else self.gpu_memory,
            "cores": list(self.cores),
        }


def allocate(
    cluster: Cluster,
    addresses: Mapping[TaskId, Address],
    machine: Machine,
    others: Mapping[str, Machine] = MappingProxyType({}),
) -> dict[TaskId, Resources]:
    """Allocates to each task a part of the machine that it runs on.

    The tasks of a machine with the same `core_use` share its cores equally. Tasks with different uses share nothing:
    ps and workers each get all cores, since they rarely compute at the same time. All other tasks get one core.

    Workers without GPUs that share a machine with a ps stay on cores of their own, if there are enough of these for
    their threads. Otherwise a ps that wakes up makes workers change cores, and their operations begin with cold caches.
    Without a ps, it gains nothing.

    Tasks that compute gradients share the GPUs equally, after the tasks for which the file names a number or IDs. Two
    tasks have the same GPU only where the file says `all`, or gives its ID to both.

    Where a scheduler places the tasks, each gets what its role asks for.

    Args:
        cluster: the tasks.
        addresses: the address of every task.
        machine: this machine. Machines that are not among `others` are assumed to be like it.
        others: the machines that are known, by the hosts of the addresses.

    Raises:
        UsageError: the file asks for GPUs that the machine does not have.
    """
    traits = cluster.launcher_traits
    if traits.scheduler:
        return {task: _scheduled(cluster, task) for task in addresses}
    hosts: dict[str, list[TaskId]] = {}
    for task, address in addresses.items():
        here = address.is_loopback or traits.containers
        hosts.setdefault(_THIS_MACHINE if here else address.host, []).append(task)
    allocated: dict[TaskId, Resources] = {}
    for host, tasks in hosts.items():
        there = machine_of(cluster, addresses[tasks[0]], machine, others)
        gpus = _allocate_gpus(cluster, _name(host, others), tasks, there)
        uses = {task: core_use(cluster.strategy, task.role) for task in tasks}
        sharers = Counter(uses.values())
        for task, use in uses.items():
            cores = max(1, there.cores // sharers[use]) if use else 1
            allocated[task] = make_resources(cluster.role(task), cores, gpus.get(task, ()))
        if not traits.containers:
            allocated |= _bind(cluster, {task: allocated[task] for task in tasks}, there.core_ids)
    return {task: allocated[task] for task in addresses}


def _bind(cluster: Cluster, tasks: Mapping[TaskId, Resources], cores: Sequence[int]) -> dict[TaskId, Resources]:
    """Gives each worker of a machine that also has a ps cores of its own; none if there are too few."""
    compute = {task: share for task, share in tasks.items() if computes_gradients(cluster.strategy, task.role)}
    beside_ps = any(task.traits.holds_variables for task in tasks)
    if not beside_ps or len(compute) < 2 or any(share.gpus for share in compute.values()):
        return {}
    wanted = [max(len(cores) // len(compute), share.cpus or 1) for share in compute.values()]
    threads = [share.intra_op_threads or 1 for share in compute.values()]
    if sum(wanted) > len(cores) or any(map(gt, threads, wanted)):
        return {}
    ends = accumulate(wanted)
    return {
        task: replace(share, cores=tuple(cores[end - own : end]))
        for (task, share), own, end in zip(compute.items(), wanted, ends, strict=True)
        if _may_bind(cluster.role(task))
    }


def _may_bind(spec: RoleSpec) -> bool:
    return spec.threads is None or spec.threads.bind


def machine_of(cluster: Cluster, address: Address, machine: Machine, others: Mapping[str, Machine]) -> Machine:
    """Returns the machine of an address, as far as it is known. The arguments are those of `allocate`."""
    return Machine(1) if cluster.launcher_traits.scheduler else others.get(address.host, machine)


def _scheduled(cluster: Cluster, task: TaskId) -> Resources:
    """The resources that a scheduler gives to a task. Of its GPUs only the number is known."""
    spec, gpus, traits = cluster.role(task), cluster.role(task).gpus, cluster.launcher_traits
    if isinstance(gpus, list) or gpus == "all":
        raise UsageError(
            f"roles.{task.role}.gpus is {gpus!r}, but {traits.scheduler} chooses the GPUs",
            code="gpus-chosen-by-scheduler",
            hint="set it to a number of GPUs",
        )
    return make_resources(spec, traits.scheduled_cpus, tuple(map(str, range(gpus or 0))))


def make_resources(spec: RoleSpec, cores: int | None, gpus: tuple[str, ...]) -> Resources:
    """Returns the resources of a task: those of its role in the file, and its share of the machine for the rest.

    Args:
        spec: the task's role in the file.
        cores: the task's share of the cores; None when it is not known.
        gpus: the GPUs that the task sees.
    """
    threads = spec.threads
    intra = (threads and threads.intra) or spec.cpus or cores
    inter = (threads and threads.inter) or (intra and max(MIN_INTER_OP_THREADS, intra))
    return Resources(intra, inter, gpus, spec.gpu_memory, spec.cpus, spec.memory)


def _name(host: str, others: Mapping[str, Machine]) -> str:
    """The name of a machine in messages; empty when its resources are not known."""
    return "this machine" if host == _THIS_MACHINE else host if host in others else ""


def _allocate_gpus(
    cluster: Cluster, name: str, tasks: Sequence[TaskId], machine: Machine
) -> dict[TaskId, tuple[str, ...]]:
    """Allocates the GPUs that the file names; the other tasks that compute gradients share the rest."""
    free = _unnamed_gpus(cluster, tasks, machine, known=bool(name))
    allocated: dict[TaskId, tuple[str, ...]] = {}
    for task in tasks:
        wanted = cluster.role(task).gpus
        if wanted == "all":
            allocated[task] = ALL_GPUS
        elif isinstance(wanted, list):
            allocated[task] = tuple(map(str, wanted))
            if name:
                _check_ids(task, allocated[task], machine, name)
        elif isinstance(wanted, int):
            if wanted > len(free):
                has = f"{name or 'its host'} has {len(machine.gpus)}, and {len(free)} of them are free"
                raise UsageError(
                    f"roles.{task.role} asks for {wanted} GPUs for {task}, but {has}",
                    code="too-few-gpus",
                    hint=f"lower roles.{task.role}.gpus, or remove it to share the GPUs that there are",
                )
            allocated[task], free = tuple(free[:wanted]), free[wanted:]
    if ALL_GPUS in allocated.values():
        free = []
    others = [task for task in tasks if task not in allocated and computes_gradients(cluster.strategy, task.role)]
    each = len(free) // len(others) if others else 0
    for index, task in enumerate(others):
        allocated[task] = tuple(free[index * each : (index + 1) * each])
    return allocated


def _unnamed_gpus(cluster: Cluster, tasks: Sequence[TaskId], machine: Machine, *, known: bool) -> list[str]:
    """The GPUs whose IDs the file gives to no task.

    If the machine is not known, it is assumed to have the number of GPUs that the file asks for, counted from 0.
    """
    wanted = [cluster.role(task).gpus for task in tasks]
    named = {str(gpu) for ids in wanted if isinstance(ids, list) for gpu in ids}
    free = [gpu for gpu in machine.gpus if gpu not in named]
    asked = sum(number for number in wanted if isinstance(number, int))
    if known or asked <= len(free):
        return free
    return list(islice((number for number in map(str, count()) if number not in named), asked))


def _check_ids(task: TaskId, ids: Sequence[str], machine: Machine, name: str) -> None:
    missing = [gpu for gpu in ids if gpu not in machine.gpus]
    if missing:
        raise UsageError(
            f"roles.{task.role}.gpus names GPU {missing[0]}, but {name} has {', '.join(machine.gpus) or 'none'}",
            code="no-such-gpu",
            hint=f"correct roles.{task.role}.gpus; `nvidia-smi -L` lists the GPUs",
        )
