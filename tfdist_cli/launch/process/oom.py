"""Whether the kernel has killed for want of memory: it counts the processes of each cgroup that it kills so.

Tasks are in the launcher's cgroup, or in one below it. Version 2 counts in `memory.events`, of all below a cgroup and
whoever's limit it was; version 1 in `memory.oom_control`, of the cgroup alone, since Linux 4.13. There those below it
are looked at too, unless the launcher is in the uppermost one, below which is the whole system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_VERSION_1 = "memory.oom_control"


class OomKills:
    """The kills of the launcher's cgroup from now on.

    Args:
        root: where `proc` and `sys` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        nothing: tuple[Path | None, bool] = None, False
        self._file, self._below = next((each for each in _counters(root) if _count(each[0]) is not None), nothing)
        self._seen: dict[Path, int] = {}
        """The most that each cgroup has told: what one has told that is removed still counts."""
        self._accounted = self._total() or 0

    def claim(self) -> bool | None:
        """Whether the kernel has killed a process for want of memory that no earlier claim was about.

        None where the kernel doesn't say.
        """
        total = self._total()
        if total is None:
            return None
        if total <= self._accounted:
            return False
        self._accounted += 1
        return True

    def _total(self) -> int | None:
        """The kills so far; None where the kernel doesn't say."""
        if self._file is None or _count(self._file) is None:
            return None
        for path in self._file.parent.rglob(_VERSION_1) if self._below else [self._file]:
            self._seen[path] = max(self._seen.get(path, 0), _count(path) or 0)
        return sum(self._seen.values())


def _counters(root: Path) -> Iterator[tuple[Path, bool]]:
    """The files that may have the count, and whether those below count too.

    A container may see its own cgroup as the uppermost one.
    """
    mounted = root / "sys" / "fs" / "cgroup"
    with suppress(OSError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if "memory" in controllers.split(","):
                yield mounted / "memory" / below / _VERSION_1, bool(below)
                yield mounted / "memory" / _VERSION_1, bool(below)
            elif not controllers:
                yield mounted / below / "memory.events", False
                yield mounted / "memory.events", False


def _count(path: Path) -> int | None:
    with suppress(OSError):
        found = _COUNT.search(path.read_text())
        return int(found[1]) if found else None
    return None
