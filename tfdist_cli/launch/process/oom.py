"""Whether the kernel has killed a process for lack of memory: it counts these kills for each cgroup.

Tasks are in the launcher's cgroup, or in one below it. Version 2 counts them in `memory.events`, for the cgroup and all
below it, whichever limit was exceeded. Version 1 counts them in `memory.oom_control`, for the cgroup alone, since Linux
4.13. There the cgroups below are read as well, unless the launcher is in the root cgroup, which contains the whole
system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_VERSION_1 = "memory.oom_control"


class OomKills:
    """The kills for lack of memory in the launcher's cgroup from now on.

    Args:
        root: the folder that contains `proc` and `sys`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        nothing: tuple[Path | None, bool] = None, False
        self._file, self._below = next((each for each in _counters(root) if _count(each[0]) is not None), nothing)
        self._seen: dict[Path, int] = {}
        """The highest count of each cgroup; the counts of removed cgroups are kept."""
        self._claimed = self._total() or 0

    def claim(self) -> bool | None:
        """Whether the kernel has killed a process for lack of memory that no earlier call has claimed.

        Returns None if the kernel has no such counter.
        """
        total = self._total()
        if total is None:
            return None
        if total <= self._claimed:
            return False
        self._claimed += 1
        return True

    def _total(self) -> int | None:
        """The number of kills so far; None if the kernel has no such counter."""
        if self._file is None or _count(self._file) is None:
            return None
        for path in self._file.parent.rglob(_VERSION_1) if self._below else [self._file]:
            self._seen[path] = max(self._seen.get(path, 0), _count(path) or 0)
        return sum(self._seen.values())


def _counters(root: Path) -> Iterator[tuple[Path, bool]]:
    """The files that may contain the counter, and whether the counters of the cgroups below have to be added.

    A container may see its own cgroup as the root cgroup.
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
