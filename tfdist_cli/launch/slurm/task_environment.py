"""What a task that `srun` has started learns of its cluster from Slurm's variables alone.

A step's tasks are numbered from 0 on; the cluster's tasks take these numbers in their own order. Where each runs
follows from the nodes and the number of tasks on each, as srun deals the tasks out in blocks where it is asked to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

LOWEST_PORT, HIGHEST_PORT = 10_000, 32_767
"""Above them Linux takes ports for outgoing connections."""
_STRIDE = 97
"""Ports from one job to the next: jobs that follow each other meet only where they have more tasks than that."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True)
class Place:
    """This process's place in a step.

    Args:
        task: which task it is.
        addresses: every task's address.
        cpus: the cores that Slurm has given to it; None when it does not say.
        gpus: ids of the GPUs that Slurm lets it see.
        sharers: the tasks that Slurm lets see the same GPUs, this one among them.
    """

    task: TaskId
    addresses: Mapping[TaskId, Address]
    cpus: int | None
    gpus: tuple[str, ...]
    sharers: tuple[TaskId, ...]


def in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of a step's tasks; a batch script is none."""
    return "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ


def find_place(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Place:
    """Finds this process's task and all addresses.

    Raises:
        UsageError: the step's tasks are not those of the cluster, or Slurm's variables cannot be read.
    """
    nodes = _node_of_each_task(environ)
    number = _number(environ, "SLURM_PROCID")
    if len(nodes) != len(cluster.tasks):
        raise UsageError(
            f"the cluster {cluster.name!r} has {len(cluster.tasks)} tasks, and srun has started {len(nodes)}",
            hint=f"srun --ntasks={len(cluster.tasks)} --distribution=block tfdist role --cluster CLUSTER",
        )
    own = environ.get("SLURMD_NODENAME", nodes[number])
    if own != nodes[number]:
        raise UsageError(
            f"{cluster.tasks[number]} runs on {own}, and the others look for it on {nodes[number]}",
            hint="have srun deal the tasks out in blocks: --distribution=block",
        )
    if any(cluster.role(task).hosts for task in cluster.tasks):
        raise UsageError("the cluster file names hosts, but Slurm has chosen the nodes", hint="remove hosts from roles")
    first = _first_port(_number(environ, "SLURM_JOB_ID"), len(nodes))
    addresses = {task: Address(nodes[index], first + index) for index, task in enumerate(cluster.tasks)}
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles"))
    part = _part(environ, number, len(nodes))
    sharers = [number] if _has_own_gpus(environ) else [other for other in part if nodes[other] == nodes[number]]
    cpus = _cpus(environ, number)
    return Place(cluster.tasks[number], addresses, cpus, gpus, tuple(cluster.tasks[other] for other in sharers))


def expand_nodes(text: str) -> tuple[str, ...]:
    """The nodes of a node list such as `n[1-3,07],login`, in its order.

    Raises:
        ValueError: it is none.
    """
    return tuple(chain.from_iterable(_expanded(part) for part in re.findall(r"(?:\[[^]]*\]|[^,])+", text)))


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of tasks on each node: `2(x3),1` → 2, 2, 2, 1.

    Raises:
        ValueError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if not found:
            raise ValueError(f"{text!r} is no list of counts: {part!r}")
        counts += repeat(int(found[1]), int(found[2] or 1))
    return tuple(counts)


def _expanded(name: str) -> Iterator[str]:
    """One entry of a node list; the last brackets count fastest."""
    head, bracket, rest = name.partition("[")
    ranges, closed, tail = rest.partition("]")
    if bool(bracket) != bool(closed) or "]" in head:
        raise ValueError(f"{name!r} is no node list: its brackets do not match")
    if not bracket:
        yield name
        return
    ends = tuple(_expanded(tail)) if tail else ("",)
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{name!r} is no node list: {part!r} is no range")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield from (f"{head}{number:0{len(found[1])}}{end}" for end in ends)


def _node_of_each_task(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The node of each task of the step. The parts of a heterogeneous job may share nodes, so they are read by part."""
    parts = range(int(environ.get("SLURM_HET_SIZE", "0")))
    names = [(f"SLURM_JOB_NODELIST_HET_GROUP_{part}", f"SLURM_TASKS_PER_NODE_HET_GROUP_{part}") for part in parts]
    found: list[str] = []
    for nodes_name, counts_name in names or [("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")]:
        try:
            nodes, counts = expand_nodes(environ[nodes_name]), expand_counts(environ[counts_name])
            found += chain.from_iterable(repeat(*pair) for pair in zip(nodes, counts, strict=True))
        except (KeyError, ValueError) as error:
            reason = f"{error} is not set" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"{nodes_name} and {counts_name} do not say where the tasks run: {reason}",
                hint="start the tasks with srun, or name each with --task",
            ) from error
    return tuple(found)


def _cpus(environ: Mapping[str, str], number: int) -> int | None:
    """The cores of one task."""
    if "SLURM_HET_SIZE" not in environ:
        return int(environ["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in environ else None
    group = next(group for group, tasks in enumerate(_parts(environ)) if number in tasks)
    cpus = environ.get(f"SLURM_CPUS_PER_TASK_HET_GROUP_{group}")
    return int(cpus) if cpus else None


def _part(environ: Mapping[str, str], number: int, tasks: int) -> range:
    """The numbers of the tasks in one task's part of the job; each part has GPUs of its own, on a shared node, too."""
    parts = _parts(environ) if "SLURM_HET_SIZE" in environ else [range(tasks)]
    return next(part for part in parts if number in part)


def _parts(environ: Mapping[str, str]) -> list[range]:
    """The numbers of the tasks in each part of a heterogeneous job."""
    groups = range(int(environ["SLURM_HET_SIZE"]))
    counts = [sum(expand_counts(environ[f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}"])) for group in groups]
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def _has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Whether Slurm gives each task GPUs of its own; otherwise all tasks of a step on a node see the same ones."""
    if "gpu" in environ.get("SLURM_TRES_PER_TASK", "") or "SLURM_GPUS_PER_TASK" in environ:
        return True
    bound = environ.get("SLURM_GPU_BIND", environ.get("SLURMD_TRES_BIND", "").removeprefix("gpu:"))
    return bound.removeprefix("verbose,").startswith(("per_task", "single", "map", "mask"))


def _first_port(job: int, tasks: int) -> int:
    """A job's first port: the others follow, one for each task of it, whichever node that is on."""
    return LOWEST_PORT + job * _STRIDE % (HIGHEST_PORT + 1 - LOWEST_PORT - tasks)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UsageError(
            f"{name} is {environ.get(name)!r}, not a number", hint="start the tasks with srun, or name each with --task"
        ) from None
