"""Whose code a frame of a traceback is: tfdist's, a library's, or the user's."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)  # not all of sys.prefix: below /usr there may be a user's own program

_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of packages, which may also be another Python's (`--system-site-packages`) or the user's (`--user`)."""


def is_ours(filename: str) -> bool:
    """Whether a file is part of tfdist."""
    return filename.startswith(_OURS)


def is_users(filename: str) -> bool:
    """Whether a file is neither tfdist's nor a library's."""
    if filename.startswith(("<", _OURS, *_INSTALLED)):
        return False
    return _PACKAGES.isdisjoint(Path(filename).parts)


def is_from_users_code(error: BaseException) -> bool:
    """Whether an error came up in code of the user's that was called from where it was caught."""
    return any(is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
