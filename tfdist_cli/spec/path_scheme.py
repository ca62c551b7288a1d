"""Paths and addresses in storage services: `runs/x` is a path, `s3://bucket/x` an address.

As a path of this machine, an address would be in a local folder `s3:`.
"""

from __future__ import annotations

import re
from pathlib import Path

from tfdist_cli.errors import InvalidValue, UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
REQUIREMENTS = {"s3": "'tfdist-cli[s3]'", "gs": "'tfdist-cli[gcs]'", "hdfs": "'tfdist-cli[hdfs]'", "memory": "fsspec"}
"""The schemes of storage services, each with the argument of `pip install` that it needs."""
_LOCAL = "file"
HINT = "use a path of this machine; a bucket or a network share can be mounted there"


class Url(str):
    """An address in a storage service, such as `s3://bucket/folder`, without a slash at its end."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        """The scheme, such as `s3`."""
        return self.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The folder with this entry; a bucket itself has none."""
        above = self.rpartition("/")[0]
        return self if above.endswith("/") else Url(above)

    def __truediv__(self, name: str) -> Url:
        """The address of an entry of this folder."""
        return Url(f"{self}/{name}")


Location = Path | Url
"""A path of this machine, or an address in a storage service."""


def location(text: str | Path) -> Location:
    """Returns the path or the address that a text contains; `file:///data` is the path `/data`.

    `Path("s3://x")` is `s3:/x`, so that one '/' counts as two.

    Raises:
        InvalidValue: it is an address that tfdist cannot use.
    """
    found = _SCHEME.fullmatch(str(text))
    if not found:
        return Path(text)
    scheme, rest = found[1].lower(), found[2].rstrip("/")
    if scheme == _LOCAL:
        return Path(f"/{rest.removeprefix('localhost/')}")
    host = rest.partition("/")[0]
    if ":" in host.rpartition("@")[0]:
        raise InvalidValue(
            f"the address {scheme}://… contains a password: put it into a variable of the environment",
            code="password-in-address",
        )
    if scheme not in REQUIREMENTS:
        known = ", ".join(f"{each}://" for each in (*REQUIREMENTS, _LOCAL))
        raise InvalidValue(
            f"tfdist cannot read or write {scheme}://, as in '{scheme}://{rest}': it supports {known}",
            code="unsupported-scheme",
        )
    if not host:
        raise InvalidValue(f"'{scheme}://' names no bucket or folder", code="empty-path")
    return Url(f"{scheme}://{rest}")


def checked_location(text: str | Path) -> Location:
    """Returns `location(text)` for an argument of a function or of a command.

    Raises:
        UsageError: it is an address that tfdist cannot use.
    """
    try:
        return location(text)
    except InvalidValue as error:
        raise UsageError(str(error), code=error.code) from None


def scheme_problem(path: str | Path) -> str | None:
    """The problem with a path that begins with a scheme, where only a path of a file system is possible."""
    found = _SCHEME.fullmatch(str(path))
    return f"'{found[1]}://{found[2]}' is not a path of this machine, which is needed here" if found else None


def refuse_scheme(path: str | Path) -> None:
    """Checks that a path is one of a file system.

    Raises:
        UsageError: the path begins with a scheme.
    """
    problem = scheme_problem(path)
    if problem:
        raise UsageError(problem, code="unsupported-scheme", hint=HINT)
