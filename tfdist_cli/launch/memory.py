"""Whether the kernel has killed for want of memory: it counts the processes of each cgroup that it kills so.

Tasks are in the launcher's cgroup, or in one below it. Version 2 counts in `memory.events`, of all below a cgroup and
whoever's limit it was; version 1 in `memory.oom_control`, of the cgroup alone, since Linux 4.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class KernelKills:
    """The kills of the launcher's cgroup from now on.

    Args:
        root: where `proc` and `sys` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = next((path for path in _counters(root) if _count(path) is not None), None)
        self._accounted = _count(self._file) or 0

    def claim(self) -> bool | None:
        """Whether the kernel has killed a process for want of memory that no earlier claim was about.

        None where the kernel doesn't say.
        """
        count = _count(self._file)
        if count is None:
            return None
        if count <= self._accounted:
            return False
        self._accounted += 1
        return True


def _counters(root: Path) -> Iterator[Path]:
    """The files that may have the count; a container may see its own cgroup as the uppermost one."""
    mounted = root / "sys" / "fs" / "cgroup"
    with suppress(OSError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if "memory" in controllers.split(","):
                yield mounted / "memory" / below / "memory.oom_control"
                yield mounted / "memory" / "memory.oom_control"
            elif not controllers:
                yield mounted / below / "memory.events"
                yield mounted / "memory.events"


def _count(path: Path | None) -> int | None:
    if path is not None:
        with suppress(OSError):
            found = _COUNT.search(path.read_text())
            return int(found[1]) if found else None
    return None
