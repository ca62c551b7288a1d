"""The machine of a measurement: its description, and the load by other processes."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("tensorflow-cpu", "tensorflow", "keras")
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
"""The variable by which TensorFlow uses oneDNN, or not: 1 or 0."""
_ONEDNN_FEATURES = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
"""x86 features. TensorFlow uses oneDNN by default if the processor has one of them (its `DefaultOneDnnPolicy`)."""


def describe(packages: Sequence[str] = PACKAGES) -> str:
    """Describes this machine without its name: cores, system, versions, and whether oneDNN was chosen."""
    versions = [f"Python {platform.python_version()}", *filter(None, map(_installed, packages))]
    chosen = [f"{ONEDNN}={os.environ[ONEDNN]}"] if ONEDNN in os.environ else []
    return f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, {', '.join([*versions, *chosen])}"


def onednn_by_default(processor: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Returns whether TensorFlow uses oneDNN on this machine by default; None if the machine does not tell.

    Args:
        processor: the kernel's description of it.
    """
    try:
        lines = processor.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    features = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return None if features is None else not _ONEDNN_FEATURES.isdisjoint(features)


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
