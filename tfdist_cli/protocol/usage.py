"""Measures what a task uses of its machine: processor, memory, network and GPUs.

A task measures itself, so that this works wherever its launcher has put it. The measurement reads `/proc` and asks the
kernel for the counters of the task's own connections; a task has no other network counters of its own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

PERIOD = 2.0
"""Minimal seconds between two measurements."""
LARGEST_SHARE = 0.0005
"""Maximal share of a core that measurements take: the pause between them grows with their cost."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TCP_INFO = 11
_COUNTERS = slice(120, 136)
"""`tcpi_bytes_acked` and `tcpi_bytes_received` in the kernel's `struct tcp_info`, since Linux 4.1."""
_NVML = "libnvidia-ml.so.1"
_MOST_GPUS = 16


class UsageMeter:
    """Measures this process.

    Args:
        proc: the folder of this process in Linux's proc file system.
        clock: a monotonic clock, in seconds.
        cpu_clock: the processor time that this process has used, in seconds.
        own_clock: that of this thread.
        gpus: reads the GPUs of this process.
    """

    def __init__(
        self,
        proc: Path = Path("/proc/self"),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        own_clock: Callable[[], float] = time.thread_time,
        gpus: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._proc = proc
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._own_clock = own_clock
        self._gpus = gpus
        self._connections: dict[str, tuple[int, int]] = {}
        self._at, self._cpu = clock(), cpu_clock()
        self._due_at = self._at + PERIOD
        self._traffic()  # what connections have carried before counts for no interval

    def measure(self) -> dict[str, Any] | None:
        """Returns the `usage` of a heartbeat, of the time since the last one; None if it is too early for one."""
        began, own = self._clock(), self._own_clock()
        if began < self._due_at:
            return None
        cpu, seconds = self._cpu_clock(), began - self._at
        fields: dict[str, Any] = {"seconds": round(seconds, 2), "memory": self._memory()}
        fields["cpu"] = round((cpu - self._cpu) / seconds, 3)
        self._at, self._cpu = began, cpu
        if (traffic := self._traffic()) is not None:
            fields |= {name: round(count / seconds) for name, count in zip(("sent", "received"), traffic, strict=True)}
        if self._gpus is None:
            self._gpus = gpu_reader()
        if found := self._gpus():
            fields["gpus"] = found
        self._due_at = began + max(PERIOD, (self._own_clock() - own) / LARGEST_SHARE)
        return fields

    def _memory(self) -> int | None:
        """The resident memory, in bytes."""
        try:
            return int((self._proc / "statm").read_text().split()[1]) * _PAGE
        except FileNotFoundError:
            import psutil  # noqa: PLC0415 a task on Linux needs none

            return int(psutil.Process().memory_info().rss)

    def _traffic(self) -> tuple[int, int] | None:
        """The bytes that connections sent and received since the last call; None where the kernel does not count."""
        try:
            counted = dict(_connections(self._proc / "fd"))
        except (OSError, AttributeError):
            return None
        sent = received = 0
        for inode, (out, into) in counted.items():
            before = self._connections.get(inode, (0, 0))
            sent, received = sent + max(0, out - before[0]), received + max(0, into - before[1])
        self._connections = counted
        return sent, received


def _connections(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the id of each TCP connection of this process, with the bytes that it has sent and received.

    The descriptors belong to other threads, so that they are only asked for their counters. One that is closed, or used
    again, meanwhile gives an error or the counters of another connection.
    """
    getsockopt = ctypes.CDLL(None).getsockopt
    buffer, length = ctypes.create_string_buffer(256), ctypes.c_uint()
    for name in os.listdir(folder):  # noqa: PTH208 names are enough
        try:
            target = os.readlink(folder / name)  # noqa: PTH115 a fifth of the time of a Path
        except OSError:
            continue
        if not target.startswith("socket:"):
            continue
        length.value = len(buffer)
        failed = getsockopt(int(name), socket.IPPROTO_TCP, _TCP_INFO, buffer, ctypes.byref(length))
        if not failed and length.value >= _COUNTERS.stop:
            yield target, struct.unpack("=QQ", buffer.raw[_COUNTERS])


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_reader(
    environ: Mapping[str, str] = os.environ, load: Callable[[str], Any] = ctypes.CDLL
) -> Callable[[], dict[str, Any]]:
    """Returns a function that reads the GPUs that this process sees: {"0": [percent in use, bytes in use]}.

    The figures are those of a whole GPU, which other processes may use too. A value that NVML does not know is None.

    Args:
        environ: has `CUDA_VISIBLE_DEVICES`.
        load: loads NVML, a library of NVIDIA's driver.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        library = None if visible in ("", "-1") else load(_NVML)
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2():
        return dict
    handles = dict(_handles(library, visible))

    def read() -> dict[str, Any]:
        found = {}
        for name, handle in handles.items():
            used, memory = _Utilization(), _Memory()
            percent = None if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) else used.gpu
            in_use = None if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.used
            found[name] = [percent, in_use]
        return found

    return read


def _handles(library: Any, visible: str | None) -> Iterator[tuple[str, ctypes.c_void_p]]:
    """Yields the names of the visible GPUs, as in `CUDA_VISIBLE_DEVICES`, with NVML's handles."""
    if visible is None:
        count = ctypes.c_uint()
        names = [] if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) else [str(n) for n in range(count.value)]
    else:
        names = [name.strip() for name in visible.split(",")]
    for name in names[:_MOST_GPUS]:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if failed:
            return  # CUDA, too, ignores what follows an invalid name
        yield name, handle
