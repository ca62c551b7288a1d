"""Derives a task's id and all addresses from the variables that Slurm sets in a step.

Slurm numbers the tasks of a step from 0. The cluster's tasks take these numbers in their listed order. The node of each
task follows from the node list and the number of tasks per node, because srun distributes tasks in blocks
(`--distribution=block`).
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
"""Linux uses higher ports for outgoing connections."""
_STRIDE = 97
"""Ports between consecutive job ids: consecutive jobs share ports only if they have more tasks than that."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True)
class StepTask:
    """The task that this process is in a step.

    Args:
        task: the task's id.
        addresses: every task's address.
        cpus: the cores that Slurm has allocated to it; None when Slurm does not report them.
        gpus: ids of the GPUs that Slurm lets it see.
        sharers: the tasks that see the same GPUs, this one included.
        join_address: where the chief of a running job takes the task; None if that follows from the addresses.
    """

    task: TaskId
    addresses: Mapping[TaskId, Address]
    cpus: int | None
    gpus: tuple[str, ...]
    sharers: tuple[TaskId, ...]
    join_address: Address | None = None


def in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a task of a step. A batch script is not."""
    return "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ


def find_step_task(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> StepTask:
    """Returns this process's task, with all addresses.

    Raises:
        UsageError: the step's tasks do not match the cluster's, or Slurm's variables cannot be read.
    """
    nodes = _node_of_each_task(environ)
    number = number_of(environ, "SLURM_PROCID")
    if len(nodes) != len(cluster.tasks):
        raise UsageError(
            f"the cluster {cluster.name!r} has {len(cluster.tasks)} tasks, but srun has started {len(nodes)}",
            code="task-count-mismatch",
            hint=f"srun --ntasks={len(cluster.tasks)} --distribution=block tfdist role --cluster CLUSTER",
        )
    own = environ.get("SLURMD_NODENAME", nodes[number])
    if own != nodes[number]:
        raise UsageError(
            f"{cluster.tasks[number]} runs on {own}, but the other tasks expect it on {nodes[number]}",
            code="task-node-mismatch",
            hint="let srun distribute the tasks in blocks: --distribution=block",
        )
    if any(cluster.role(task).hosts for task in cluster.tasks):
        raise UsageError(
            "the cluster file names hosts, but Slurm has chosen the nodes",
            code="hosts-not-supported",
            hint="remove hosts from roles",
        )
    first = first_port(number_of(environ, "SLURM_JOB_ID"), len(nodes))
    addresses = {task: Address(nodes[index], first + index) for index, task in enumerate(cluster.tasks)}
    gpus = visible_gpus(environ)
    component = _component_of(environ, number, len(nodes))
    sharers = [number] if _has_own_gpus(environ) else [other for other in component if nodes[other] == nodes[number]]
    cpus = _cpus(environ, number)
    return StepTask(cluster.tasks[number], addresses, cpus, gpus, tuple(cluster.tasks[other] for other in sharers))


def expand_nodes(text: str) -> tuple[str, ...]:
    """Returns the nodes of a node list such as `n[1-3,07],login`, in its order.

    Raises:
        ValueError: the text is not a node list.
    """
    return tuple(chain.from_iterable(_expanded(part) for part in re.findall(r"(?:\[[^]]*\]|[^,])+", text)))


def expand_counts(text: str) -> tuple[int, ...]:
    """Returns the number of tasks on each node: `2(x3),1` → 2, 2, 2, 1.

    Raises:
        ValueError: the text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if not found:
            raise ValueError(f"{text!r} is not a list of counts: {part!r}")
        counts += repeat(int(found[1]), int(found[2] or 1))
    return tuple(counts)


def _expanded(name: str) -> Iterator[str]:
    """Yields the nodes of one entry of a node list; the last brackets vary fastest."""
    head, bracket, rest = name.partition("[")
    ranges, closed, tail = rest.partition("]")
    if bool(bracket) != bool(closed) or "]" in head:
        raise ValueError(f"{name!r} is not a node list: its brackets do not match")
    if not bracket:
        yield name
        return
    ends = tuple(_expanded(tail)) if tail else ("",)
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{name!r} is not a node list: {part!r} is not a range")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield from (f"{head}{number:0{len(found[1])}}{end}" for end in ends)


def _node_of_each_task(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the node of each task of the step.

    The components of a heterogeneous job may share nodes. Their node lists are therefore read separately.
    """
    groups = range(int(environ.get("SLURM_HET_SIZE", "0")))
    names = [(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}") for group in groups]
    found: list[str] = []
    for nodes_name, counts_name in names or [("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")]:
        try:
            nodes, counts = expand_nodes(environ[nodes_name]), expand_counts(environ[counts_name])
            found += chain.from_iterable(repeat(*pair) for pair in zip(nodes, counts, strict=True))
        except (KeyError, ValueError) as error:
            reason = f"{error} is not set" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"{nodes_name} and {counts_name} do not name the node of each task: {reason}",
                code="slurm-variable-invalid",
                hint="start the tasks with srun, or name each task with --task",
            ) from error
    return tuple(found)


def _cpus(environ: Mapping[str, str], number: int) -> int | None:
    """Returns the cores of one task; None when Slurm does not report them."""
    if "SLURM_HET_SIZE" not in environ:
        return int(environ["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in environ else None
    group = next(group for group, tasks in enumerate(_components(environ)) if number in tasks)
    cpus = environ.get(f"SLURM_CPUS_PER_TASK_HET_GROUP_{group}")
    return int(cpus) if cpus else None


def _component_of(environ: Mapping[str, str], number: int, tasks: int) -> range:
    """Returns the numbers of the tasks in one task's component of the job.

    Each component has separate GPUs, also where components share a node.
    """
    components = _components(environ) if "SLURM_HET_SIZE" in environ else [range(tasks)]
    return next(component for component in components if number in component)


def _components(environ: Mapping[str, str]) -> list[range]:
    """Returns the numbers of the tasks in each component of a heterogeneous job."""
    groups = range(int(environ["SLURM_HET_SIZE"]))
    counts = [sum(expand_counts(environ[f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}"])) for group in groups]
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the ids of the GPUs that Slurm lets this process see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles"))


def _has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Whether Slurm allocates separate GPUs to each task. Otherwise all tasks of a step on a node see the same ones."""
    if "gpu" in environ.get("SLURM_TRES_PER_TASK", "") or "SLURM_GPUS_PER_TASK" in environ:
        return True
    bound = environ.get("SLURM_GPU_BIND", environ.get("SLURMD_TRES_BIND", "").removeprefix("gpu:"))
    return bound.removeprefix("verbose,").startswith(("per_task", "single", "map", "mask"))


def first_port(job: int, tasks: int) -> int:
    """Returns a job's first port. The next ports belong to the next tasks, on whichever node they run."""
    return LOWEST_PORT + job * _STRIDE % (HIGHEST_PORT + 1 - LOWEST_PORT - tasks)


def number_of(environ: Mapping[str, str], name: str) -> int:
    """Returns the number in a variable of Slurm.

    Raises:
        UsageError: it is not set, or is not a number.
    """
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UsageError(
            f"{name} is {environ.get(name)!r}, not a number",
            code="slurm-variable-invalid",
            hint="start the tasks with srun, or name each task with --task",
        ) from None
