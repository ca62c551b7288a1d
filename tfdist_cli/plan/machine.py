"""What a machine has for its tasks: cores, GPUs and memory."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

NO_PROXY = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
"""The environment variables that list the hosts for which no proxy is used."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with the memory limit of a container: of cgroup version 2, and of version 1."""
_CGROUP_QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)
"""The files with the processor time that a container may use, and in which time: of version 2, and of version 1."""
_TOPOLOGY = Path("/sys/devices/system/cpu")
"""Where the kernel describes the processors."""


@dataclass(frozen=True)
class Machine:
    """The resources of a machine.

    Args:
        cores: logical processors that this process may use, or as many as its container has the time of.
        gpus: the IDs of its GPUs, in the form of `CUDA_VISIBLE_DEVICES`.
        memory: bytes of memory for all its processes together; None when it is not known.
        no_proxy: the variables of `NO_PROXY` that are set on it.
        core_ids: the IDs of these processors, those that share caches side by side; empty if its system binds no
            threads to them, or the container has not the whole time of each.
    """

    cores: int
    gpus: tuple[str, ...] = ()
    memory: int | None = None
    no_proxy: Mapping[str, str] = field(default_factory=dict)
    core_ids: tuple[int, ...] = ()

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Machine:
        """Returns the resources of this machine that this process may use."""
        core_ids = _core_ids()
        cores = len(core_ids) or os.cpu_count() or 1
        quota = _quota()
        if quota < cores:
            cores, core_ids = max(1, math.ceil(quota)), ()
        no_proxy = {name: environ[name] for name in NO_PROXY if name in environ}
        return cls(cores, _visible_gpus(environ), _memory(), no_proxy, core_ids)


def _quota(files: Sequence[Sequence[Path]] = _CGROUP_QUOTAS) -> float:
    """How many processors this process's container has the time of, `docker run --cpus`; infinity without a limit."""
    quota = math.inf
    for paths in files:
        with suppress(OSError, ValueError):  # another version of cgroup, or "max"
            time, period = map(int, " ".join(path.read_text() for path in paths).split())
            if time > 0:  # -1 without a limit
                quota = min(quota, time / period)
    return quota


def _core_ids(topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """The logical processors that this process may use, by their sockets and physical cores.

    The kernel often counts the first hyper-threads of all cores before the second ones.
    """
    if sys.platform != "linux":
        return ()
    return tuple(sorted(os.sched_getaffinity(0), key=lambda core: (*_place(topology / f"cpu{core}"), core)))


def _place(core: Path) -> tuple[int, int]:
    """The socket and the physical core of a logical processor; zeros where the kernel does not tell."""
    try:
        socket, physical = ((core / "topology" / name).read_text() for name in ("physical_package_id", "core_id"))
        return int(socket), int(physical)
    except (OSError, ValueError):  # a sandbox without these files
        return 0, 0


def _visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        found = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
        return tuple(str(number) for number in found)
    ids = (part.strip() for part in visible.split(","))
    return tuple(takewhile(lambda gpu: gpu not in ("", "-1"), ids))  # CUDA, too, ignores all IDs after an invalid one


def _memory(limits: Sequence[Path] = _CGROUP_LIMITS) -> int | None:
    """The memory of this machine in bytes, or the limit of its container if that is lower."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # the system does not report it
        return None
    for path in limits:
        with suppress(OSError, ValueError):  # another version of cgroup, or "max"
            memory = min(memory, int(path.read_text()))
    return memory
