"""How the driver of an engine tells the launcher why it ends: a line of its output."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

_PREFIX = "tfdist-driver-error "
_NO_MODULE = re.compile(r"No module named '(\w+)")


@dataclass(frozen=True)
class DriverError:
    """Why an application has ended.

    Args:
        message: what is wrong.
        code: the stable name of the problem; see `TfdistError`.
        hint: the fix.
        usage: whether the user's configuration is wrong.
    """

    message: str
    code: str
    hint: str
    usage: bool = False


def error_line(error: DriverError) -> str:
    """Returns the line for the launcher."""
    return f"{_PREFIX}{json.dumps(asdict(error))}\n"


def missing_package(text: str, python: str, hint: str) -> DriverError | None:
    """Returns the error for a Python that lacks a package; None if a text of the engine names none.

    Args:
        text: the text.
        python: which Python.
        hint: where to install what is missing.
    """
    found = _NO_MODULE.search(text)
    if not found:
        return None
    what = "tfdist" if found[1] == "tfdist_cli" else f"the package {found[1]}, which tfdist needs,"
    return DriverError(f"{what} is not installed {python}", "tfdist-missing", hint, usage=True)


def parse_error(line: str) -> DriverError | None:
    """Returns the error in a line of the driver's output; None if it has none."""
    return DriverError(**json.loads(line[len(_PREFIX) :])) if line.startswith(_PREFIX) else None
