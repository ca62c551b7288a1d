"""Copying files to hosts: what there is to copy, what a host lacks of it, and taking it in.

As with rsync, a file is taken to be the same when its size and its time of change are. What was copied before and is
no longer here is removed there; nothing else is. The directories of runs stay where they are.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePath

from tfdist_cli.launch.run_dir import LOCK_FILE

CHUNK = 1024 * 1024
LIST_FILE = ".tfdist-files.json"
"""In the folder that files are copied to: what was."""
_NEVER = (".git", "__pycache__")
_NEW = ".tfdist-new"


@dataclass(frozen=True)
class Entry:
    """A file to copy.

    Args:
        path: where it is, from the folder that all are in, with '/'.
        size: bytes.
        changed: when it was changed last, in microseconds: not every file system keeps more.
        mode: its permissions.
    """

    path: str
    size: int
    changed: int
    mode: int

    @classmethod
    def of(cls, path: Path, base: Path) -> Entry:
        """A file as it is now."""
        found = path.stat()
        return cls(path.relative_to(base).as_posix(), found.st_size, found.st_mtime_ns // 1000, found.st_mode & 0o777)

    def as_json(self) -> list[object]:
        """In plain JSON types; `Entry(*fields)` reads it."""
        return list(astuple(self))


def common_folder(roots: Sequence[Path]) -> Path:
    """The folder that files and folders are in, from which their places to one another are kept."""
    return Path(os.path.commonpath([root.parent for root in roots]))


def list_files(roots: Sequence[Path], exclude: Sequence[str]) -> list[Entry]:
    """The files below some roots, or that are roots themselves; in a work tree of git those that it does not ignore.

    Args:
        roots: absolute paths.
        exclude: patterns as a shell has them, of a name or of a path from its root.
    """
    base = common_folder(roots)
    found: dict[str, Entry] = {}
    for root in roots:
        for path in _below(root):
            if path.is_file() and not _is_excluded(path, root, exclude) and not _is_of_a_run(path.parent, root):
                entry = Entry.of(path, base)
                found[entry.path] = entry
    return [found[path] for path in sorted(found)]


def _is_excluded(path: Path, root: Path, exclude: Sequence[str]) -> bool:
    inner = PurePath(root.name) if path == root else path.relative_to(root)
    paths = [inner, *inner.parents][: len(inner.parts)]
    return any(fnmatch(str(each), pattern) or fnmatch(each.name, pattern) for each in paths for pattern in exclude)


@cache
def _is_of_a_run(folder: Path, root: Path) -> bool:
    """Whether a folder is a run's directory, or in one."""
    if folder == root or root not in folder.parents:
        return False
    return (folder / LOCK_FILE).exists() or _is_of_a_run(folder.parent, root)


def _below(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    known = _known_to_git(root)
    if known is not None:
        yield from known
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NEVER]
        yield from (Path(folder, name) for name in names)


def _known_to_git(root: Path) -> list[Path] | None:
    """The files of a work tree that git keeps or would add; None outside of one, and for what it ignores altogether."""
    try:
        if _git(root, "check-ignore", "--quiet", str(root)).returncode == 0:
            return None
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except OSError:  # there is no git
        return None
    if listed.returncode:
        return None
    return [root / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)  # noqa: S607


def lacking(to: Path, entries: Sequence[Entry]) -> list[int]:
    """Which files a folder does not have as they are, by their places in the list."""
    return [index for index, entry in enumerate(entries) if not _has(to, entry)]


def _has(to: Path, entry: Entry) -> bool:
    with suppress(OSError):
        there = Entry.of(to / entry.path, to)
        return (there.size, there.changed) == (entry.size, entry.changed)
    return False


def remove_former(to: Path, entries: Sequence[Entry]) -> int:
    """Removes what was copied to a folder before and is not among the files any more; gives how many those were."""
    listing = to / LIST_FILE
    try:
        before = set(json.loads(listing.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        before = set()
    former = before - {entry.path for entry in entries}
    for path in former:
        with suppress(OSError):
            (to / path).unlink()
    to.mkdir(parents=True, exist_ok=True)
    write_whole(listing, json.dumps([entry.path for entry in entries]).encode())
    return len(former)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file at once: several hosts may have one home, and one of them read what another writes."""
    new = path.with_name(f".{socket.gethostname()}-{os.getpid()}{_NEW}")
    new.write_bytes(data)
    new.replace(path)


class Incoming:
    """A file that comes in pieces; it is seen when it is whole.

    Args:
        to: the folder that all are copied to.
        entry: which file.
    """

    def __init__(self, to: Path, entry: Entry) -> None:
        self._path = to / entry.path
        self._entry = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._new = self._path.with_name(f".{socket.gethostname()}-{os.getpid()}{_NEW}")
        self._file = self._new.open("wb")

    def add(self, data: bytes, *, last: bool) -> None:
        """Takes the next piece."""
        self._file.write(data)
        if last:
            self._file.close()
            self._new.chmod(self._entry.mode)
            changed = self._entry.changed * 1000
            os.utime(self._new, ns=(changed, changed))
            self._new.replace(self._path)


def pieces(path: Path) -> Iterator[tuple[bytes, bool]]:
    """A file's content in pieces, each with whether it is the last."""
    with path.open("rb") as file:
        data = file.read(CHUNK)
        while True:
            following = file.read(CHUNK)
            yield data, not following
            if not following:
                return
            data = following
