"""Reading the files of a run, whatever has become of them: every reader of a run's directory begins here.

A run's directory may have been copied in part, edited by hand, or filled by a program of the user's. What is damaged is
an `OSError` or a `ValueError`, and nothing else: a named pipe is not waited for, and values are as JSON means them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 256 * 1024 * 1024
"""Bytes of a file that is read whole."""
TAIL = 256 * 1024
"""Bytes at the end of a file in which its last lines are looked for."""
DEEPEST = 16
"""Levels of maps and lists in a value; what takes it apart need not be ready for thousands."""
_COUNTABLE = 2**63


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file, and never waits for what is none.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_bytes(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or is larger than `LARGEST`.
    """
    with open_file(path) as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(errno.EFBIG, "it is too large", str(path))
    return data


def parse_object(data: bytes | str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none, is not UTF-8, or is nested as none of ours is.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if isinstance(value, dict) and not is_nested(value):
        return _writable(value)  # type: ignore[no-any-return]
    raise ValueError("it is not a JSON object, or is nested too deep")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds none.
    """
    return parse_object(read_bytes(path))


def read_lines(path: Path, *, tail: bool = False) -> Iterator[dict[str, Any]]:
    """The objects in a JSON Lines file; none where there is no file. Lines that are damaged, or begun, are left out.

    Args:
        path: the file.
        tail: whether only lines near its end are wanted.

    Raises:
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError), open_file(path) as file:
        if tail:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        yield from parse_lines(file)


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects in lines, without what is damaged."""
    for line in lines:
        with suppress(ValueError):
            yield parse_object(line)


def number(value: object) -> float | None:
    """A number to count with; None for what is none, not finite, or beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _COUNTABLE else None


def whole(value: object) -> int | None:
    """A whole number; None for what is none."""
    return int(value) if isinstance(value, int) and number(value) is not None else None


def timestamp(value: object) -> datetime | None:
    """A time in ISO 8601, in UTC; None for what is none, or one that no clock has shown."""
    try:
        found = datetime.fromisoformat(str(value))
        found = found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return found if 1970 <= found.year < 9999 else None


def is_nested(value: object) -> bool:
    """Whether there are more levels than `DEEPEST`."""
    level = [value]
    for _ in range(DEEPEST):
        level = [item for each in level for item in _items(each)]
    return bool(level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _writable(value: Any) -> Any:
    """The value with texts that can be written: JSON can say half a surrogate pair, UTF-8 cannot."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value
