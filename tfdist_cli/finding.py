"""A problem of a host or of the user's code, and its fix: what `tfdist doctor` and `tfdist check` report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A problem that is found before a job starts.

    Args:
        code: a stable name of the problem.
        level: `error` if the job would fail, `warning` if it may fail or is slow.
        place: the name of a host, a task, or a file and a line.
        message: the problem.
        fix: how to fix it.
    """

    code: str
    level: Level
    place: str
    message: str
    fix: str
