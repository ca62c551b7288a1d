"""Where a run comes from: the versions of its launcher, and the commit of the recipe's folder."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tfdist_cli.spec.sections.recipe import Recipe

_SECONDS = 2.0
"""Maximal time of one call of Git, which has to read every file of a large working tree."""


def provenance(recipe: Recipe | None) -> dict[str, Any]:
    """Returns `python`, `tfdist`, `host`, `commit` and `modified`, and `recipe` and `recipe_sha256`.

    The commit is None if the folder of the recipe's module is in no Git repository; the last two are there for a recipe
    from a storage service.

    Args:
        recipe: the recipe; None for a program, with the commit of the working directory.
    """
    folder = (recipe.module_dir if recipe else None) or Path.cwd()
    source = recipe.source if recipe else None
    own_source = {"recipe": str(source.address), "recipe_sha256": source.sha256} if source else {}
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    try:
        own = version("tfdist-cli")
    except PackageNotFoundError:
        own = None
    return {
        "python": platform.python_version(),
        "tfdist": own,
        "host": platform.node(),
        "commit": commit or None,
        "modified": None if changes is None else bool(changes),
        **own_source,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of Git; None if it fails, takes too long, or is not installed."""
    argv = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # without locks: the user may commit meanwhile
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
