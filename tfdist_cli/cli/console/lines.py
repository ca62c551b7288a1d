"""Output lines of tasks: a prefix in the role's colour, control sequences removed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from tfdist_cli.spec.roles import ROLES

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from tfdist_cli.spec.task_id import TaskId

_ROLE_STYLES = {role: Style(color=traits.colour) for role, traits in ROLES.items()}
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links and other strings
    r"|\x1b[ -/]*[0-~]?"  # anything else that an escape begins
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"  # single control characters; a tab is none
    r"|[\u202a-\u202e\u2066-\u2069]"  # reversed text direction, which would go on after the line
)


def neutral(text: str) -> str:
    """Removes control sequences, which could move the cursor, change colours or query the terminal."""
    return _SEQUENCE.sub("", text) if _SEQUENCE.search(text) else text


class TaskLines:
    """Lines to print with `soft_wrap` and without markup.

    They consist of rich segments: rich's `Text` objects take a hundred times as long, too long for a flood of output.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self.count = 0

    def add(self, task: TaskId, lines: Iterable[str]) -> None:
        """Adds lines of a task."""
        prefix = Segment(f"[{task}] ", _ROLE_STYLES[task.role])
        for line in lines:
            self._segments += (prefix, Segment(f"{neutral(line)}\n"))
            self.count += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments
