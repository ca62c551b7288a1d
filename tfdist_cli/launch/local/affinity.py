"""Binds the threads of tasks to cores: the CPU affinity of Linux, see sched_setaffinity(2)."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, PlannedTask
from tfdist_cli.spec.task_id import TaskId


def bind(pid: int, cores: Collection[int]) -> None:
    """Makes the kernel run all threads of a process, and those that they start later, on some cores.

    A process that has exited stays as it is; so does one that may no longer use any of these cores.

    Args:
        pid: the process, on Linux.
        cores: the IDs of the cores; with none, it stays as it is.
    """
    bound: set[int] = set()
    while cores and (threads := _threads(pid) - bound):  # a thread that was not bound yet may have started others
        for thread in threads:
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)
        bound |= threads


def _threads(pid: int) -> set[int]:
    try:
        return {int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()}
    except OSError:  # it has exited
        return set()


class BoundTasks:
    """The running tasks of a machine, and their cores.

    Tasks that run keep their threads when others join or leave, and these no longer fit the new shares of the cores.
    From then on no task is bound, until the plan has the cores again with which the running ones have started.
    """

    def __init__(self) -> None:
        self._running: dict[TaskId, tuple[int, tuple[int, ...]]] = {}
        """The process of each task, and its cores in the plan when it started."""
        self._fits = True
        """Whether the plan still has these cores."""

    def start(self, planned: PlannedTask, pid: int) -> None:
        """Binds the process of a task that has just started to its cores in the plan, if it has some."""
        self._running[planned.task] = pid, planned.resources.cores
        if self._fits:
            bind(pid, planned.resources.cores)

    def end(self, task: TaskId) -> None:
        """Forgets a task that has ended."""
        self._running.pop(task, None)
        self._fits = self._fits or not self._running

    def follow(self, plan: Plan) -> None:
        """Binds all tasks, or none, as a new plan of the running tasks requires."""
        planned = {each.task: each.resources.cores for each in plan.tasks}
        fits = all(planned.get(task, cores) == cores for task, (_, cores) in self._running.items())
        if fits == self._fits:
            return
        self._fits = fits
        for pid, cores in self._running.values():
            for each in _with_children(pid) if cores else ():
                bind(each, cores if fits else Machine.here().core_ids)


def _with_children(pid: int) -> list[int]:
    """A process, and those that it has started, such as the program of a shell."""
    with suppress(psutil.Error):  # it has exited
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []
