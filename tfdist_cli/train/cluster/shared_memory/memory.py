"""Memory that the tasks of a host share: one task writes what it sends, and the others read it there.

A task's memory is a file without a name, `memfd_create(2)`. Other processes of the same user open it by the path of its
descriptor in `/proc`. So it ends with the processes, and the size of `/dev/shm` is no limit. A task on another host, of
another user or in another container cannot open it: then what is sent crosses in messages.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ALIGNED = 64
"""TensorFlow uses an array without a copy if its address is a multiple of this."""
_NAME = "tfdist"
NONCE_BYTES = 16
_IDENTITY = struct.Struct(f"<qqq{NONCE_BYTES}s")
"""The host, a process, a descriptor of it, and the random bytes that its file begins with."""
IDENTITY_BYTES = _IDENTITY.size
SWITCH = "TFDIST_SHARE_MEMORY"
"""The environment variable that is 0 for a task that shares no memory."""
SMALLEST_REGION = 1 << 20
"""Bytes of the smallest region that messages are written to."""


@dataclass(frozen=True)
class Place:
    """Where a message is in a task's memory.

    Args:
        descriptor: of the file, in that task.
        offset: the bytes before it.
    """

    descriptor: int
    offset: int


class OwnMemory:
    """Memory that this task writes to.

    A region has two halves, which take turns. So what was written stays until the message after the next one. A message
    that does not fit gets a region of twice its size or more; those before stay, as others may still read there.
    """

    def __init__(self) -> None:
        first, self.identity = Region.identifying()
        """What another task needs to open the memory, `IDENTITY_BYTES` bytes."""
        self._regions = [first]

    @classmethod
    def if_supported(cls) -> OwnMemory | None:
        """Returns memory, or None if this system cannot share any: macOS has no `memfd_create`."""
        try:
            return cls()
        except (AttributeError, OSError):
            return None

    def write(self, turn: int, messages: Sequence[Sequence[np.ndarray]]) -> list[Place]:
        """Writes messages into one half of a region; returns their places.

        Args:
            turn: the number of the exchange; even ones and odd ones have a half each.
            messages: the bytes of each, one array after another.

        Raises:
            OSError: there is no memory or no descriptor for a larger region. Nothing was written.
        """
        needed = sum(aligned(sum(map(len, arrays))) for arrays in messages)
        if needed > self._regions[-1].half:
            self._regions.append(Region.new(max(SMALLEST_REGION, 2 << (needed - 1).bit_length())))
        region = self._regions[-1]
        places, offset = [], (turn % 2) * region.half
        for arrays in messages:
            places.append(Place(region.descriptor, offset))
            for array in arrays:
                region.memory[offset : offset + len(array)] = array
                offset += len(array)
            offset = aligned(offset)
        return places

    def close(self) -> None:
        """Closes the descriptors. The memory stays for as long as an array of it does."""
        for region in self._regions:
            os.close(region.descriptor)
        self._regions.clear()


class OthersMemory:
    """The memory of another task of this host.

    Args:
        process: its process.
        first: the descriptor of the region that identifies it.
    """

    def __init__(self, process: int, first: int = 0) -> None:
        self.process, self._first = process, first
        self._regions: dict[int, np.ndarray] = {}

    @classmethod
    def opened(cls, identity: bytes) -> OthersMemory | None:
        """Returns the memory of a task; None if it cannot be opened here.

        Args:
            identity: what the task has sent.
        """
        try:
            return cls.of(identity)
        except OSError:
            return None

    @classmethod
    def of(cls, identity: bytes) -> OthersMemory:
        """Returns the memory of a task.

        Args:
            identity: what the task has sent.

        Raises:
            FileNotFoundError: the task has ended, or has closed its memory.
            OSError: it cannot be opened here: the task is on another host or of another user, or there is no memory or
                no descriptor left.
        """
        host, process, descriptor, nonce = _IDENTITY.unpack(identity)
        if host != _host():
            raise OSError(errno.EREMOTE, f"the memory of process {process} is on another host, or in another container")
        memory = cls(process, descriptor)
        try:
            with gone_if_ended(process):
                found = memory.first(len(nonce)).tobytes()
        except ValueError:  # the descriptor is that of another file by now
            found = b""
        if not secrets.compare_digest(found, nonce):
            raise FileNotFoundError(errno.ENOENT, f"process {process} has no such memory")
        return memory

    def first(self, size: int) -> np.ndarray:
        """Returns the first bytes of the region that identifies it."""
        return self.read(Place(self._first, 0), size)

    def read(self, place: Place, size: int) -> np.ndarray:
        """Returns the bytes of a message, without a copy.

        Args:
            place: where it is.
            size: its bytes.

        Raises:
            OSError: the task has ended, or the memory cannot be opened.
            ValueError: there is no such memory.
        """
        region = self._regions.get(place.descriptor)
        if region is None:
            region = self._regions[place.descriptor] = _opened(self.process, place.descriptor)
        if not 0 <= place.offset <= place.offset + size <= len(region):
            raise ValueError(f"it has {len(region)} bytes")
        return region[place.offset : place.offset + size]


@dataclass(frozen=True)
class Region:
    """A file of this task.

    Args:
        descriptor: its descriptor.
        memory: its bytes.
    """

    descriptor: int
    memory: np.ndarray

    @classmethod
    def identifying(cls, more: int = 0) -> tuple[Region, bytes]:
        """Returns a region of random bytes, and what another task needs to recognize it, `IDENTITY_BYTES` bytes.

        Args:
            more: the bytes behind these, which are 0.

        Raises:
            AttributeError, OSError: this system cannot share memory, or has none left; or this task is told not to.
        """
        if os.environ.get(SWITCH) == "0":
            raise OSError(errno.EPERM, f"{SWITCH} is 0")
        nonce = secrets.token_bytes(NONCE_BYTES)
        region = cls.new(NONCE_BYTES + more)
        region.memory[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        return region, _IDENTITY.pack(_host(), os.getpid(), region.descriptor, nonce)

    @classmethod
    def new(cls, size: int) -> Region:
        """Returns an empty region of a number of bytes."""
        create: Any = os.memfd_create
        descriptor = create(_NAME)
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, _mapped(descriptor))
        except OSError:
            os.close(descriptor)
            raise

    @property
    def half(self) -> int:
        """Half of its bytes."""
        return len(self.memory) // 2


def aligned(size: int) -> int:
    """Returns the bytes up to the next address that TensorFlow uses."""
    return -(-size // ALIGNED) * ALIGNED


@cache
def _host() -> int:
    """A number of this host and of its container: processes of another container may have the same numbers."""
    seen = Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())
    return int.from_bytes(hashlib.sha256("".join(seen).encode()).digest()[:8], "little", signed=True)


def has_ended(process: int) -> bool:
    """Whether a process has ended, is ending, or has a parent that has not noticed that it has."""
    try:
        pages = Path(f"/proc/{process}/statm").read_bytes().split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return _state(process) in (b"Z", b"X") or pages == b"0"


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by a signal, or by a debugger."""
    return _state(process) in (b"T", b"t")


def _state(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return b"X"


@contextmanager
def gone_if_ended(process: int) -> Iterator[None]:
    """Within the context, what is opened belongs to another process: when it ends, only root may look at that.

    Raises:
        FileNotFoundError: the process has ended.
        PermissionError: it has not, and is of another user.
    """
    try:
        yield
    except (ProcessLookupError, PermissionError) as error:
        if isinstance(error, PermissionError) and not has_ended(process):
            raise
        raise FileNotFoundError(errno.ENOENT, f"process {process} has ended") from error


def _opened(process: int, descriptor: int) -> np.ndarray:
    """Opens and maps a file of another process. Other files than such memory are left alone."""
    path = Path(f"/proc/{process}/fd/{descriptor}")
    if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
        raise ValueError(f"{path} is no memory of a task")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(opened)
    finally:
        os.close(opened)


def _mapped(descriptor: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
