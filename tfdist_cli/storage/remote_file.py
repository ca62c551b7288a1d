"""An object of a storage service as a file: it is read in parts, and can be larger than memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.storage.remote import ObjectState, RemoteFolder
from tfdist_cli.storage.retry import StorageError

PART = 4 << 20
"""Bytes that one request reads, unless more are asked for."""


class RemoteFile(io.RawIOBase):
    """Reads ranges of an object. A request that fails is repeated, and continues where the last one ended.

    Args:
        folder: the folder.
        name: the object's name in it.

    Raises:
        FileNotFoundError: it does not exist.
    """

    def __init__(self, folder: RemoteFolder, name: str) -> None:
        super().__init__()
        self._read_part: Callable[[int, int], bytes] = lambda start, end: folder.read(name, start, end)
        self._describe: Callable[[], ObjectState] = lambda: folder.describe(name)
        self._url = folder.url / name
        self._found = self._describe()
        self._at = 0

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._found.size

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Changes the position, and returns it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Reads bytes into a buffer, and returns their number; 0 at the end.

        Raises:
            OSError: the service failed, or the object has changed since it was opened.
        """
        end = min(self._at + len(buffer), self.size)
        if end <= self._at:
            return 0
        content = self._read_part(self._at, end)
        buffer[: len(content)] = content
        self._at = end
        if end == self.size and self._describe() != self._found:
            raise StorageError(f"{self._url} has changed while it was read")
        return len(content)


def open_location(at: Location) -> BinaryIO:
    """Opens a file of this machine, or an object of a storage service, for reading.

    Raises:
        OSError: it does not exist, or cannot be read.
    """
    if isinstance(at, Path):
        return at.open("rb")
    return open_object(RemoteFolder(at.parent), at.name)


def open_object(folder: RemoteFolder, name: str) -> io.BufferedReader:
    """Opens an object of a folder for reading.

    Raises:
        OSError: it does not exist, or cannot be read.
    """
    return io.BufferedReader(RemoteFile(folder, name), PART)
