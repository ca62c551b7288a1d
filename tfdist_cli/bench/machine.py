"""The machine of a measurement: its description, and the load by other processes."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil

PACKAGES = ("tensorflow-cpu", "tensorflow", "keras")


def describe(packages: Sequence[str] = PACKAGES) -> str:
    """Describes this machine without its name: cores, system, versions."""
    versions = [f"Python {platform.python_version()}", *filter(None, map(_installed, packages))]
    return f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, {', '.join(versions)}"


@dataclass(frozen=True)
class Usage:
    """Processor seconds used so far: by all processes, and by this process's terminated children."""

    moment: float
    total: float
    own: float

    @classmethod
    def now(cls) -> Usage:
        """Returns the usage until now."""
        times, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        total = times.user + times.system + times.nice
        return cls(time.monotonic(), total, children.ru_utime + children.ru_stime)

    def others(self) -> float:
        """Returns the share of the machine that other processes have used since, from 0 to 1."""
        now = Usage.now()
        used = (now.total - self.total) - (now.own - self.own)
        return max(0.0, used / ((now.moment - self.moment) * (os.cpu_count() or 1)))


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""
