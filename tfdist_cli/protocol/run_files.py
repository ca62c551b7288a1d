"""Reads the files of a run robustly: every reader of a run's directory uses these functions.

A run's directory may have been copied in part, edited by hand, or filled by the user's program. Damaged files lead to
an `OSError` or a `ValueError`, and to nothing else: named pipes never block, and values have the types of JSON.
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
"""Maximal size of a file that is read as a whole, in bytes."""
TAIL = 256 * 1024
"""Bytes at the end of a file that are searched for its last lines."""
DEEPEST = 16
"""Maximal nesting of maps and lists in a value, so that recursive functions need no other limit."""
_COUNTABLE = 2**63


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file. Never blocks on another kind of file.

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
    """Parses a JSON object.

    Raises:
        ValueError: it is not a JSON object, is not UTF-8, or is nested too deep.
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
        ValueError: it contains none.
    """
    return parse_object(read_bytes(path))


def read_lines(path: Path, *, tail: bool = False) -> Iterator[dict[str, Any]]:
    """The objects in a JSON Lines file; none if there is no file. Damaged and incomplete lines are skipped.

    Args:
        path: the file.
        tail: whether to read only lines near its end.

    Raises:
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError), open_file(path) as file:
        if tail:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        yield from parse_lines(file)


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects in lines; damaged lines are skipped."""
    for line in lines:
        with suppress(ValueError):
            yield parse_object(line)


def number(value: object) -> float | None:
    """The value if it is a finite number within 64 bits; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _COUNTABLE else None


def whole(value: object) -> int | None:
    """The value if it is an integer within 64 bits; otherwise None."""
    return int(value) if isinstance(value, int) and number(value) is not None else None


def timestamp(value: object) -> datetime | None:
    """The time in UTC if the value is a plausible time in ISO 8601; otherwise None."""
    try:
        found = datetime.fromisoformat(str(value))
        found = found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return found if 1970 <= found.year < 9999 else None


def is_nested(value: object) -> bool:
    """Whether a value is nested deeper than `DEEPEST`."""
    level = [value]
    for _ in range(DEEPEST):
        level = [item for each in level for item in _items(each)]
    return bool(level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _writable(value: Any) -> Any:
    """The value with texts that UTF-8 can encode: JSON may contain half of a surrogate pair, UTF-8 may not."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value
