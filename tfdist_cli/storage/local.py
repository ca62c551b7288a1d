"""A folder of this machine, used like a folder in a storage service."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tfdist_cli.spec.path_scheme import Location, Url
from tfdist_cli.storage.remote import RemoteFolder

_WRITING = ".writing-"


class Folder(Protocol):
    """A folder whose files are complete or absent. Files have names relative to it."""

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """Returns the name and the size of each file in it."""

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
            FileNotFoundError: it does not exist.
        """

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, and replaces an existing one, completely or not at all."""

    def upload(self, file: Path, name: str) -> None:
        """Copies a file of this machine into the folder, completely or not at all."""

    def delete(self, names: Iterable[str]) -> None:
        """Deletes files one after the other. One that does not exist is no error."""


def open_folder(at: Location) -> Folder:
    """Returns a folder of this machine or of a storage service.

    Raises:
        UsageError: the library for the service is not installed, or it cannot be used.
    """
    return RemoteFolder(at) if isinstance(at, Url) else LocalFolder(at)


class LocalFolder:
    """A folder of this machine without subfolders. It is created when the first file is written.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """See `Folder`."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self._path / below) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it has just been deleted
                    if entry.is_file() and not entry.name.startswith(_WRITING):
                        found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        """See `Folder`."""
        return (self._path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """See `Folder`."""
        temporary = self._temporary(name)
        temporary.write_bytes(content)
        self._publish(temporary, name)

    def upload(self, file: Path, name: str) -> None:
        """See `Folder`."""
        temporary = self._temporary(name)
        shutil.copyfile(file, temporary)
        self._publish(temporary, name)

    def delete(self, names: Iterable[str]) -> None:
        """See `Folder`."""
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path / f"{_WRITING}{name}"

    def _publish(self, temporary: Path, name: str) -> None:
        """Renames a file to its final name when it is on the disk."""
        for path in (temporary, self._path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if path is self._path:
                    temporary.replace(self._path / name)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
