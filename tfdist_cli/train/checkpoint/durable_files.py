"""Durable files: complete and on the disk when the function that writes them returns."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tfdist_cli.protocol.run_files import open_file

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)
"""What file systems answer that have no hard links, or no more for this file."""


def write_synced(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file, and replaces an existing one, completely or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def link(path: Path, new: Path) -> None:
    """Gives a file another name, by a hard link; copies it where the file system has none."""
    try:
        new.hardlink_to(path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(path, new)
        sync(new)


def remove(path: Path) -> None:
    """Removes a file or a folder as far as possible; the next start tries again to remove the rest."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Waits until the content of a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """Returns a file's SHA-256."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
