"""The files of a recipe from a storage service, kept on this machine in a folder that is named by their content.

The content is the SHA-256 of what `sha256sum` prints of the files in the order of their names. In a copy of the folder
`LC_ALL=C find * -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum` prints it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MOST_BYTES, MOST_FILES = 16 << 20, 1000
"""The limits of a folder with a recipe."""
KEPT = "recipe"
"""The folder in a run directory with a copy of the files."""
SHA256 = re.compile(r"[0-9a-f]{64}")

Files = Mapping[str, bytes]
"""The content of each file, by its name relative to the folder, such as `package/model.py`."""


def belongs(name: str) -> bool:
    """Whether a file is one of the recipe: hidden files and compiled modules are not."""
    return not any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def content_of(files: Files) -> str:
    """Returns the SHA-256 of files and their names, in hexadecimal digits."""
    lines = (f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files, key=os.fsencode))
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    """Reads the files of a folder.

    Raises:
        OSError: one cannot be read.
    """
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if belongs(name)}


def find(sha256: str) -> Path | None:
    """Returns the folder with a content; None if it is not on this machine, or was changed here."""
    folder = _folder(sha256)
    return folder if _has(folder, sha256) else None


def keep(files: Files) -> Path:
    """Writes files to the folder of their content, and returns it.

    Raises:
        OSError: it cannot be written.
    """
    sha256 = content_of(files)
    folder = _folder(sha256)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        _write(files, new)
        if not _has(folder, sha256):
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    except OSError:
        if not _has(folder, sha256):  # another process may have written it meanwhile
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def copy_to_run(sha256: str, run_dir: Path) -> None:
    """Writes a copy of a content to a run directory, unless it is there or not on this machine.

    Raises:
        OSError: it cannot be written.
    """
    kept = run_dir / KEPT
    folder = None if _has(kept, sha256) else find(sha256)
    if folder:
        shutil.rmtree(kept, ignore_errors=True)
        _write(read_files(folder), kept)


def _folder(sha256: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache").absolute() / "tfdist" / "recipes" / sha256


def _has(folder: Path, sha256: str) -> bool:
    with suppress(OSError):
        return folder.is_dir() and content_of(read_files(folder)) == sha256
    return False


def _write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
