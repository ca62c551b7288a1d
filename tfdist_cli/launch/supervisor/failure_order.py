"""Orders failures by cause where times cannot: a task may notice another task's exit before the launcher does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tfdist_cli.spec.task_id import TaskId

TASK_LOST = ("task-lost", "chief-lost", "chief-failed")
"""The codes of tfdist's errors that say that another task has exited or does not answer."""
_TENSORFLOW = re.compile("UnavailableError|AbortedError|CancelledError|DeadlineExceededError|CoordinationServiceError")
"""The types of TensorFlow's errors that say the same."""
_TASK = re.compile(r"/job:(?P<job>\w+)/(?:replica:\d+/)?task:(?P<number>\d+)|\b(?P<role>[a-z_]+):(?P<index>\d+)\b")


@dataclass(frozen=True)
class ReportedError:
    """The first error that a task reported.

    Args:
        text: `type: message`; empty when it reported none.
        code: the problem's code; empty where the error is not one of tfdist's own.
        retry: whether a restart of the task may help.
    """

    text: str = ""
    code: str = ""
    retry: bool = True

    @property
    def is_consequence(self) -> bool:
        """Whether another task caused it: that task has exited or does not answer."""
        return self.code in TASK_LOST or bool(_TENSORFLOW.match(self.text))

    @property
    def tasks(self) -> set[TaskId]:
        """The tasks that it names."""
        found = set()
        for each in _TASK.finditer(self.text):
            with suppress(ValueError):  # "file:3" is not a task
                found.add(TaskId.parse(f"{each['job'] or each['role']}:{each['number'] or each['index']}"))
        return found


NO_ERROR = ReportedError()


def causes_first(failed: Sequence[TaskId], errors: Mapping[TaskId, ReportedError]) -> tuple[TaskId, ...]:
    """Sorts failed tasks so that each task comes after those that caused its failure.

    Args:
        failed: the tasks, in the order in which their failures were reported.
        errors: what they reported.
    """
    ordered: dict[TaskId, None] = {}
    visited: set[TaskId] = set()
    causes = {task: errors[task].tasks if task in errors and errors[task].is_consequence else set() for task in failed}

    def add(task: TaskId) -> None:
        if task not in visited:
            visited.add(task)
            for other in failed:
                if other in causes[task]:
                    add(other)
            ordered[task] = None

    for task in failed:
        add(task)
    return tuple(ordered)
