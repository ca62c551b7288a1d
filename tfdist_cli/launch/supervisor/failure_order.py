"""Which failure came first where the clock cannot tell: a task may hear of another's end before the launcher does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tfdist_cli.spec.task_id import TaskId

_OF_ANOTHER = re.compile(
    r"(UnavailableError|AbortedError|CancelledError|DeadlineExceededError|CoordinationServiceError|.* has ended)"
)
"""How an error begins that tells of another task's end."""
_NAME = re.compile(r"/job:(?P<job>\w+)/(?:replica:\d+/)?task:(?P<number>\d+)|\b(?P<role>[a-z_]+):(?P<index>\d+)\b")


def tells_of_another(error: str) -> bool:
    """Whether an error, `type: message`, is that another task is gone or does not answer."""
    return bool(_OF_ANOTHER.match(error))


def causes_first(failed: Sequence[TaskId], errors: Mapping[TaskId, str]) -> tuple[TaskId, ...]:
    """The failed tasks in their order, but each behind those whose end its error tells of.

    Args:
        failed: the tasks, in the order in which their failures were heard of.
        errors: what they reported, `type: message`.
    """
    ordered: dict[TaskId, None] = {}
    visited: set[TaskId] = set()

    def add(task: TaskId) -> None:
        if task not in visited:
            visited.add(task)
            for other in failed:
                if other in told[task]:
                    add(other)
            ordered[task] = None

    told = {task: names(error) if tells_of_another(error := errors.get(task, "")) else set() for task in failed}
    for task in failed:
        add(task)
    return tuple(ordered)


def names(error: str) -> set[TaskId]:
    """The tasks that an error names."""
    found = set()
    for each in _NAME.finditer(error):
        with suppress(ValueError):  # "file:3" is none
            found.add(TaskId.parse(f"{each['job'] or each['role']}:{each['number'] or each['index']}"))
    return found
