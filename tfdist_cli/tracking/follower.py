"""Follows a JSON Lines file that grows, and that a training which resumes replaces by a shorter one."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist_cli.protocol.run_files import open_file, parse_lines

_PART = 1000
"""Lines that are read at a time."""


class Follower:
    """Reads the complete lines of a file once, across processes if a position is kept.

    Args:
        path: the file. It may not exist yet.
        position: the file that keeps a checksum of each line that was read; None to begin with the first line.
    """

    def __init__(self, path: Path, position: Path | None = None) -> None:
        self._path = path
        self._position = position
        self._read = array("I")
        """The checksum of each line that was read."""
        self._offset = 0
        self._file: tuple[int, int] | None = None
        """The device and the inode of the file."""
        if position and position.exists():
            data = position.read_bytes()
            self._read.frombytes(data[: len(data) // self._read.itemsize * self._read.itemsize])

    def rewound(self) -> bool:
        """Whether lines that were read are no longer in the file. The next lines are those after the common ones."""
        try:
            with open_file(self._path) as file:
                state = _stat(self._path)
                if state == self._file and file.seek(0, 2) >= self._offset:
                    return False
                file.seek(0)
                self._file, self._offset, common = state, 0, 0
                for line in file:
                    if common == len(self._read) or _checksum(line) != self._read[common]:
                        break
                    self._offset += len(line)
                    common += 1
        except FileNotFoundError:
            return False
        lost = common < len(self._read)
        if lost:
            del self._read[common:]
            self._save()
        return lost

    def restart(self) -> None:
        """Begins with the first line again."""
        self._read, self._offset = array("I"), 0
        self._save()

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the new lines in parts. A part counts as read when the next one is asked for."""
        while lines := self._next_lines():
            yield list(parse_lines(lines))
            self._read.extend(map(_checksum, lines))
            self._offset += sum(map(len, lines))
            self._save()

    def _next_lines(self) -> list[bytes]:
        lines: list[bytes] = []
        try:
            with open_file(self._path) as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n") or len(lines) == _PART:
                        break
                    lines.append(line)
        except FileNotFoundError:
            return []
        return lines

    def _save(self) -> None:
        if self._position:
            new = self._position.with_name(f".{self._position.name}.new")
            new.write_bytes(self._read.tobytes())
            new.replace(self._position)


def _stat(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_dev, state.st_ino


def _checksum(line: bytes) -> int:
    return zlib.crc32(line)
