"""One thing that is wrong with a host, and its fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Args:
        code: what it is, in a word that programs can look for.
        level: whether the job would fail of it, or only might.
        host: where.
        message: what is wrong.
        fix: what to do about it.
    """

    code: str
    level: Level
    host: str
    message: str
    fix: str
