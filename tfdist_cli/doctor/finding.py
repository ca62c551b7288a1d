"""A problem of a host and its fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A problem of a host.

    Args:
        code: a stable name of the problem.
        level: `error` if the job would fail, `warning` if it may fail.
        host: the name of the host.
        message: the problem.
        fix: how to fix it.
    """

    code: str
    level: Level
    host: str
    message: str
    fix: str
