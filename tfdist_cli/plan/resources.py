"""Sharing one machine's cores and GPUs out over the tasks that run on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.resources import MIN_INTER_OP_THREADS, GpuMemory, Size
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.strategies import computes_gradients, core_use
from tfdist_cli.spec.task_id import TaskId

ALL_GPUS = ("all",)
"""Stands for every GPU that a task's process would see by itself, however many those are."""

HERE = ""
"""Stands for this machine among the hosts, under whichever name it goes."""

NO_PROXY = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
"""Variables with the hosts that no proxy is asked for."""


@dataclass(frozen=True)
class Machine:
    """What a machine has.

    Args:
        cores: logical processors that this process may use.
        gpus: ids as CUDA_VISIBLE_DEVICES takes them.
        memory: bytes that its processes may have all together; None when that is not known.
        no_proxy: those of `NO_PROXY` that are set there.
    """

    cores: int
    gpus: tuple[str, ...] = ()
    memory: int | None = None
    no_proxy: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Machine:
        """This machine, as this process may use it."""
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        no_proxy = {name: environ[name] for name in NO_PROXY if name in environ}
        return cls(cores, _visible_gpus(environ), _memory(), no_proxy)


def _visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        found = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
        return tuple(str(number) for number in found)
    ids = (part.strip() for part in visible.split(","))
    return tuple(takewhile(lambda gpu: gpu not in ("", "-1"), ids))  # CUDA, too, stops at the first bad one


_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What a container may have, of version 2 and version 1."""


def _memory(limits: Sequence[Path] = _CGROUP_LIMITS) -> int | None:
    """The machine's memory in bytes, or its container's where that has less."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # a system that doesn't say
        return None
    for path in limits:
        with suppress(OSError, ValueError):  # no such version, or "max"
            memory = min(memory, int(path.read_text()))
    return memory


@dataclass(frozen=True)
class Resources:
    """What one task may use.

    Args:
        intra_op_threads: threads that one operation is split over; None for one for each core of a machine that is not
            known yet.
        inter_op_threads: operations that run at once; None where that follows from the same machine.
        gpus: ids of the GPUs it sees, or `ALL_GPUS`.
        gpu_memory: what it takes of each GPU's memory; None for TensorFlow's own way, nearly all of it at once.
        cpus: cores that it was promised; None when it shares them.
        memory: memory that it was promised.
    """

    intra_op_threads: int | None
    inter_op_threads: int | None
    gpus: tuple[str, ...] = ()
    gpu_memory: GpuMemory | None = None
    cpus: int | None = None
    memory: Size | None = None

    def as_json(self) -> dict[str, Any]:
        """What the task may use, in plain JSON types; amounts of memory as a file has them."""
        return {
            "intra_op_threads": self.intra_op_threads,
            "inter_op_threads": self.inter_op_threads,
            "cpus": self.cpus,
            "memory": None if self.memory is None else str(self.memory),
            "gpus": list(self.gpus),
            "gpu_memory": str(self.gpu_memory) if isinstance(self.gpu_memory, Size) else self.gpu_memory,
        }


def share_out(
    cluster: Cluster,
    addresses: Mapping[TaskId, Address],
    machine: Machine,
    others: Mapping[str, Machine] = MappingProxyType({}),
) -> dict[TaskId, Resources]:
    """What each task gets of the machine it runs on.

    Cores go to the tasks that compute: workers, the ps and data workers in `parameter_server`; elsewhere to all tasks
    but the evaluator and the data dispatcher. Those of one kind share them; other kinds have them, too.
    GPUs go to the tasks that compute gradients and to those that the file gives some; a ps sees none. They overlap only
    where the file says `all`, or names one for two tasks.

    Args:
        cluster: the tasks.
        addresses: every task's address.
        machine: this machine; one that is not among `others` is taken to be like it.
        others: what is known of other machines, by the hosts of the addresses.

    Where a scheduler places the tasks, each gets what its role asks for.

    Raises:
        UsageError: the tasks of this machine are to have more GPUs than it has, or others.
    """
    traits = cluster.launcher_traits
    if traits.scheduler:
        return {task: _as_asked_for(cluster, task) for task in addresses}
    hosts: dict[str, list[TaskId]] = {}
    for task, address in addresses.items():
        here = address.is_loopback or traits.containers
        hosts.setdefault(HERE if here else address.host, []).append(task)
    shares: dict[TaskId, Resources] = {}
    for host, tasks in hosts.items():
        there = machine_of(cluster, addresses[tasks[0]], machine, others)
        gpus = _share_gpus(cluster, _name(host, others), tasks, there)
        uses = {task: core_use(cluster.strategy, task.role) for task in tasks}
        sharers = Counter(uses.values())
        for task, use in uses.items():
            fair = max(1, there.cores // sharers[use]) if use else 1
            shares[task] = make_resources(cluster.role(task), fair, gpus.get(task, ()))
    return {task: shares[task] for task in addresses}


def machine_of(cluster: Cluster, address: Address, machine: Machine, others: Mapping[str, Machine]) -> Machine:
    """The machine of a task's address, as far as it is known; the arguments are those of `share_out`."""
    return Machine(1) if cluster.launcher_traits.scheduler else others.get(address.host, machine)


def _as_asked_for(cluster: Cluster, task: TaskId) -> Resources:
    """What a scheduler gives to a task: of its GPUs only the number is known."""
    spec, gpus, traits = cluster.role(task), cluster.role(task).gpus, cluster.launcher_traits
    if isinstance(gpus, list) or gpus == "all":
        raise UsageError(
            f"roles.{task.role}.gpus is {gpus!r}, but {traits.scheduler} chooses the GPUs",
            hint="give it a number of GPUs",
        )
    return make_resources(spec, traits.scheduled_cpus, tuple(map(str, range(gpus or 0))))


def make_resources(spec: RoleSpec, fair: int | None, gpus: tuple[str, ...]) -> Resources:
    """What a task of a role may use.

    Args:
        spec: the role's own wishes.
        fair: the cores of a task that has none of its own; None when they are not known.
        gpus: the GPUs that it sees.
    """
    threads = spec.threads
    intra = (threads and threads.intra) or spec.cpus or fair
    inter = (threads and threads.inter) or (intra and max(MIN_INTER_OP_THREADS, intra))
    return Resources(intra, inter, gpus, spec.gpu_memory, spec.cpus, spec.memory)


def _name(host: str, others: Mapping[str, Machine]) -> str:
    """How a machine is told of; empty when nothing is known of it."""
    return "this machine" if host == HERE else host if host in others else ""


def _share_gpus(
    cluster: Cluster, name: str, tasks: Sequence[TaskId], machine: Machine
) -> dict[TaskId, tuple[str, ...]]:
    """What the file gives to a task first; the learners it says nothing of share the rest."""
    free = _unnamed_gpus(cluster, tasks, machine, known=bool(name))
    shares: dict[TaskId, tuple[str, ...]] = {}
    for task in tasks:
        wanted = cluster.role(task).gpus
        if wanted == "all":
            shares[task] = ALL_GPUS
        elif isinstance(wanted, list):
            shares[task] = tuple(map(str, wanted))
            if name:
                _check_ids(task, shares[task], machine, name)
        elif isinstance(wanted, int):
            if wanted > len(free):
                has = f"{name or 'its host'} has {len(machine.gpus)}, {len(free)} of them free"
                raise UsageError(
                    f"{task} is to have {wanted} GPUs, but {has}",
                    hint=f"lower roles.{task.role}.gpus, or leave it out to share what there is",
                )
            shares[task], free = tuple(free[:wanted]), free[wanted:]
    if ALL_GPUS in shares.values():
        free = []
    others = [task for task in tasks if task not in shares and computes_gradients(cluster.strategy, task.role)]
    each = len(free) // len(others) if others else 0
    for index, task in enumerate(others):
        shares[task] = tuple(free[index * each : (index + 1) * each])
    return shares


def _unnamed_gpus(cluster: Cluster, tasks: Sequence[TaskId], machine: Machine, *, known: bool) -> list[str]:
    """The GPUs that no task was given by their ids.

    How many another host has may not be known here: what the file asks of it is then taken to be there, counted from 0.
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
            f"{task} is to have GPU {missing[0]}, but {name} has {', '.join(machine.gpus) or 'none'}",
            hint=f"correct roles.{task.role}.gpus; `nvidia-smi -L` lists the GPUs",
        )
