"""The files of a new project, and how they are written: all of them or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.schema import json_schema

Files = Mapping[str, str]
"""The content of each file by its path below the project's folder."""
_SCHEMAS = ".tfdist"
"""The folder of the JSON Schemas, which editors find by the first line of a YAML file."""


def schema_comment(kind: Literal["cluster", "recipe"]) -> str:
    """Returns the first line of a YAML file in the project's folder, by which editors find its schema."""
    return f"# yaml-language-server: $schema={_SCHEMAS}/{kind}.schema.json\n"


def schemas(*kinds: Literal["cluster", "recipe"]) -> Files:
    """Returns the JSON Schemas of this version of tfdist, as `tfdist schema` prints them."""
    return {f"{_SCHEMAS}/{kind}.schema.json": json.dumps(json_schema(kind), indent=2) + "\n" for kind in kinds}


def write_files(folder: Path, files: Files, *, force: bool) -> list[Path]:
    """Writes files into a folder, which is made if it does not exist.

    Args:
        folder: the folder.
        files: the files.
        force: whether existing files are replaced.

    Returns:
        The paths written, without schemas.

    Raises:
        UsageError: a file exists, or cannot be written. If one exists, none is written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", code="not-a-folder", hint="choose another folder")
    existing = [name for name in files if (folder / name).exists() and not name.startswith(_SCHEMAS)]
    if existing and not force:
        raise UsageError(
            f"{folder / existing[0]} exists" + (f", and {len(existing) - 1} more files" if existing[1:] else ""),
            code="file-exists",
            hint="choose another folder, or pass --force to replace what is there",
        )
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} cannot be written: {error.strerror}",
            code="cannot-write",
            hint="choose a folder that you may write to",
        ) from error
    return [folder / name for name in files if not name.startswith(_SCHEMAS)]
