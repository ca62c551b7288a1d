"""The files that a pattern matches, on this machine or in a storage service."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import Url, checked_location
from tfdist_cli.storage.remote import RemoteFolder

_MAGIC = re.compile(r"[*?\[]")


def matches(pattern: str) -> list[str]:
    """Returns the files that a pattern matches, sorted by name. `*` and `?` match within one folder.

    Raises:
        UsageError: there is none, or the service cannot be used.
    """
    at = checked_location(pattern)
    found = _remote_matches(at) if isinstance(at, Url) else _local_matches(at.expanduser())
    if not found:
        raise UsageError(
            f"there is no file {pattern}", code="no-such-file", hint="give a file, or a pattern such as data/*.csv"
        )
    return found


def _local_matches(path: Path) -> list[str]:
    matches = [str(path)] if path.is_file() else sorted(glob.glob(str(path)))  # noqa: PTH207 - Path.glob refuses absolute patterns
    return [match for match in matches if Path(match).is_file()]


def _remote_matches(url: Url) -> list[str]:
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts) - 1)
    folder, pattern = Url(f"{scheme}://{'/'.join(parts[: max(fixed, 1)])}"), parts[max(fixed, 1) :]
    try:
        names = RemoteFolder(folder).sizes()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be listed: {error.strerror or error}",
            code="storage-unreachable",
            hint="check the address and the credentials",
        ) from error
    return [str(folder / name) for name in names if _fits(name.split("/"), pattern)]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
