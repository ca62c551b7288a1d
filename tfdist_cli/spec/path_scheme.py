"""Paths that name a service, such as `gs://bucket/x`: taken as a path that would be a local folder `gs:`."""

from __future__ import annotations

import re
from pathlib import Path

from tfdist_cli.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)//?([^/].*)?", re.DOTALL)
HINT = "use a path of this machine, where a bucket or a share can be mounted"


def scheme_problem(path: str | Path) -> str | None:
    """What is wrong with a path that begins with a scheme; None for a path of a file system.

    A `Path` has one '/' left of the two.
    """
    found = _SCHEME.fullmatch(str(path))
    return f"'{found[1]}//{found[2] or ''}' is no path: tfdist cannot read or write {found[1]}//" if found else None


def refuse_scheme(path: str | Path) -> None:
    """Refuses a path that begins with a scheme.

    Raises:
        UsageError: it does.
    """
    problem = scheme_problem(path)
    if problem:
        raise UsageError(problem, hint=HINT)
