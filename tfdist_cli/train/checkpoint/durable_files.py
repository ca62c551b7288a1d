"""Files that are on the disk, whole, when their writer says so."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tfdist_cli.protocol.run_files import open_file


def write_synced(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file in the place of another, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def remove(path: Path) -> None:
    """Removes a file or a folder, as far as that can be done: what stays is tried again at the next start."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Waits until what a file or a folder holds is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """A file's SHA-256."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
