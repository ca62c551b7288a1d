"""Compares the memory that tasks take with the machine and with the limits in the cluster file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfdist_cli.finding import Finding
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

HERE = "this machine"


def task_facts(facts: Mapping[str, Any]) -> dict[TaskId, Mapping[str, int]]:
    """Returns the facts of each task: `variables_bytes`, `memory_bytes`, and of it Python and TensorFlow's part."""
    return {TaskId.parse(name.split()[1]): values for name, values in facts.items() if name.startswith("task ")}


def memory_findings(cluster: Cluster, facts: Mapping[str, Any], machine_bytes: int | None) -> Iterator[Finding]:
    """Yields the tasks whose memory does not suffice.

    Args:
        cluster: the cluster.
        facts: those of the check.
        machine_bytes: the memory of this machine; None if it is not known.
    """
    tasks = task_facts(facts)
    for task, own in tasks.items():
        limit = cluster.role(task).memory
        if limit and own["memory_bytes"] > limit.bytes:
            yield Finding(
                code="task-memory",
                level="error" if own["variables_bytes"] > limit.bytes else "warning",
                place=str(task),
                message=f"it takes about {shown(own['memory_bytes'])} of memory, and its limit is {shown(limit.bytes)}",
                fix=f"set roles.{task.role}.memory to more, or use more tasks or smaller batches",
            )
    here = [own for task, own in tasks.items() if cluster.launcher_traits.local_processes and _is_here(cluster, task)]
    # Forked tasks share most of what Python and TensorFlow take, see docs/explanation/failures.md.
    taken = sum(own["memory_bytes"] - own["base_bytes"] for own in here) + max(
        (own["base_bytes"] for own in here), default=0
    )
    if machine_bytes and taken > machine_bytes:
        yield Finding(
            code="machine-memory",
            level="error" if sum(own["variables_bytes"] for own in here) > machine_bytes else "warning",
            place=HERE,
            message=f"the tasks take about {shown(taken)} of memory together, and the machine has "
            f"{shown(machine_bytes)}",
            fix="use fewer tasks, smaller batches or more machines: if memory runs out, tasks are killed",
        )


def _is_here(cluster: Cluster, task: TaskId) -> bool:
    return cluster.address(task).is_loopback


def shown(number: float) -> str:
    """Returns a number of bytes for people, with a decimal unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f} bytes"
