"""Paths of services, such as `gs://bucket/x`. As a path of this machine it would be in a local folder `gs:`."""

from __future__ import annotations

import re
from pathlib import Path

from tfdist_cli.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)//?([^/].*)?", re.DOTALL)
HINT = "use a path of this machine; a bucket or a network share can be mounted there"


def scheme_problem(path: str | Path) -> str | None:
    """The problem with a path that begins with a scheme; None for a path of a file system.

    `Path("gs://x")` is `gs:/x`, so that one '/' counts as two.
    """
    found = _SCHEME.fullmatch(str(path))
    return f"'{found[1]}//{found[2] or ''}' is not a path: tfdist cannot read or write {found[1]}//" if found else None


def refuse_scheme(path: str | Path) -> None:
    """Checks that a path is one of a file system.

    Raises:
        UsageError: the path begins with a scheme.
    """
    problem = scheme_problem(path)
    if problem:
        raise UsageError(problem, code="unsupported-scheme", hint=HINT)
