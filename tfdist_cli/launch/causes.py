"""Which failure came first where the clock cannot tell: a task may hear of another's end before the launcher does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

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

    told = {task: set(_named(errors.get(task, ""))) for task in failed}
    for task in failed:
        add(task)
    return tuple(ordered)


def _named(error: str) -> Iterator[TaskId]:
    """The tasks that an error of another's end names."""
    if not tells_of_another(error):
        return
    for found in _NAME.finditer(error):
        try:
            yield TaskId.parse(f"{found['job'] or found['role']}:{found['number'] or found['index']}")
        except ValueError:
            continue
