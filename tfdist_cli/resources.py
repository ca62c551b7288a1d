"""Sharing one machine's cores and GPUs out over the tasks that run on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

MIN_INTER_OP_THREADS = 4
"""A ps or worker with one inter-op thread deadlocks: a blocked receive keeps the only thread that could send."""

HERE = ""
"""Stands for this machine among the hosts, under whichever name it goes."""


@dataclass(frozen=True)
class Machine:
    """What a machine has.

    Args:
        cores: logical processors that this process may use.
        gpus: ids as CUDA_VISIBLE_DEVICES takes them.
    """

    cores: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Machine:
        """This machine, as this process may use it."""
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            found = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
            return cls(cores, tuple(str(number) for number in found))
        ids = (part.strip() for part in visible.split(","))
        return cls(
            cores, tuple(takewhile(lambda gpu: gpu not in ("", "-1"), ids))
        )  # CUDA, too, stops at the first bad one


@dataclass(frozen=True)
class Resources:
    """What one task may use.

    Args:
        intra_op_threads: threads that one operation is split over.
        inter_op_threads: operations that run at once.
        gpus: ids of the GPUs it sees.
    """

    intra_op_threads: int
    inter_op_threads: int
    gpus: tuple[str, ...] = ()


def share_out(cluster: Cluster, addresses: Mapping[TaskId, Address], machine: Machine) -> dict[TaskId, Resources]:
    """What each task gets of the machine it runs on, which is taken to be like `machine`.

    Cores go to the tasks that compute: workers, the ps and data workers in `parameter_server`; elsewhere to all tasks
    but the evaluator and the data dispatcher. Those of one kind share them; other kinds have them, too.
    GPUs go to the tasks that compute gradients and to those that the file gives some, without overlap; a ps sees none.

    Raises:
        UsageError: the tasks of this machine are to have more GPUs than it has.
    """
    hosts: dict[str, list[TaskId]] = {}
    for task, address in addresses.items():
        hosts.setdefault(HERE if address.is_loopback else address.host, []).append(task)
    shares: dict[TaskId, Resources] = {}
    for host, tasks in hosts.items():
        gpus = _share_gpus(cluster, host, tasks, machine)
        count = Counter(_kind(cluster, task) for task in tasks)
        for task in tasks:
            kind = _kind(cluster, task)
            fair = 1 if kind == "idle" else max(1, machine.cores // count[kind])
            cores = cluster.role(task).cpus or fair
            shares[task] = Resources(cores, max(MIN_INTER_OP_THREADS, cores), gpus.get(task, ()))
    return {task: shares[task] for task in addresses}


def _share_gpus(
    cluster: Cluster, host: str, tasks: Sequence[TaskId], machine: Machine
) -> dict[TaskId, tuple[str, ...]]:
    """What the file gives to a task first; the learners it says nothing of share the rest."""
    free = list(machine.gpus)
    shares = {}
    for task in tasks:
        wanted = cluster.role(task).gpus
        if wanted is not None:
            if wanted > len(free) and host == HERE:
                has = f"this machine has {len(machine.gpus)}, {len(free)} of them free"
                raise UsageError(
                    f"{task} is to have {wanted} GPUs, but {has}",
                    hint=f"lower roles.{task.role}.gpus, or leave it out to share what there is",
                )
            shares[task], free = tuple(free[:wanted]), free[wanted:]
    others = [task for task in tasks if task not in shares and _kind(cluster, task) == "learner"]
    each = len(free) // len(others) if others else 0
    for index, task in enumerate(others):
        shares[task] = tuple(free[index * each : (index + 1) * each])
    return shares


def _kind(cluster: Cluster, task: TaskId) -> str:
    """What a task does with its cores: computes gradients, applies updates, prepares data, or next to nothing."""
    if task.role in ("ps", "data_worker"):
        return task.role
    asynchronous = cluster.strategy == "parameter_server"
    return "learner" if task.role == "worker" or (task.role == "chief" and not asynchronous) else "idle"
