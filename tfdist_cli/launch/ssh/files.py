"""Copies files to hosts: lists the files here, finds those that a host lacks, and writes them there.

As in rsync, two files are equal if their sizes, modification times and permissions are. Files that were copied before
and no longer exist here are removed there; other files are not. Run directories are not copied.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any

import psutil

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import LOCK_FILE

CHUNK = 1024 * 1024
LIST_FILE = ".tfdist-files.json"
"""A file in the target folder: the origin and the paths of the copied files."""
_CACHE = "__pycache__"
_NEVER = (".git", _CACHE)
_NEW = ".tfdist-new"


@dataclass(frozen=True)
class Entry:
    """A file to copy.

    Args:
        path: the path relative to the common folder, with '/'.
        size: bytes.
        modified: the modification time in microseconds; not every file system is more precise.
        mode: the permissions.
    """

    path: str
    size: int
    modified: int
    mode: int

    @classmethod
    def of(cls, path: Path, base: Path) -> Entry:
        """Returns the entry of a file as it is now."""
        status = path.stat()
        name, modified = path.relative_to(base).as_posix(), status.st_mtime_ns // 1000
        return cls(name, status.st_size, modified, status.st_mode & 0o777)

    def as_json(self) -> list[object]:
        """Returns the fields in plain JSON types; `Entry(*fields)` is the inverse."""
        return list(astuple(self))


@dataclass(frozen=True)
class FileList:
    """The files to copy to a folder on a host.

    Args:
        origin: a unique name of the machine and the folder that they come from.
        entries: the files.
    """

    origin: str = ""
    entries: tuple[Entry, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FileList:
        """Returns the list that `as_json` has encoded."""
        return cls(fields["origin"], tuple(Entry(*entry) for entry in fields["files"]))

    def as_json(self) -> dict[str, Any]:
        """Returns the list in plain JSON types."""
        return {"origin": self.origin, "files": [entry.as_json() for entry in self.entries]}


def common_folder(roots: Sequence[Path]) -> Path:
    """Returns the folder that contains all roots; paths relative to it are kept on the host."""
    return Path(os.path.commonpath([root.parent for root in roots]))


def list_files(roots: Sequence[Path], exclude: Sequence[str]) -> list[Entry]:
    """Lists the files below the roots, or that are roots themselves; in a git work tree without ignored files.

    Args:
        roots: absolute paths.
        exclude: shell patterns of a name, or of a path relative to its root.
    """
    base = common_folder(roots)
    patterns = [pattern.rstrip("/").removeprefix("./") for pattern in exclude]
    entries: dict[str, Entry] = {}
    for root in roots:
        for path in _below(root, partial(_is_excluded, root, patterns)):
            if path.is_file() and not _is_in_run_dir(path.parent, root):
                entry = Entry.of(path, base)
                entries[entry.path] = entry
    return [entries[path] for path in sorted(entries)]


def _is_excluded(root: Path, patterns: Sequence[str], path: Path) -> bool:
    inner = PurePath(root.name) if path == root else path.relative_to(root)
    paths = [inner, *inner.parents][: len(inner.parts)]
    return any(fnmatch(str(each), pattern) or fnmatch(each.name, pattern) for each in paths for pattern in patterns)


@cache
def _is_in_run_dir(folder: Path, root: Path) -> bool:
    """Whether a folder is a run directory, or inside one."""
    if folder == root or root not in folder.parents:
        return False
    return (folder / LOCK_FILE).exists() or _is_in_run_dir(folder.parent, root)


def _below(root: Path, excluded: Callable[[Path], bool], within: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yields the files of a folder, and of its linked folders, submodules and nested repositories.

    Args:
        root: the folder, or a file.
        excluded: whether a path is excluded.
        within: the resolved folders on the path to `root`. A link to one of them, or to a parent, is skipped.
    """
    if not root.is_dir():
        if not excluded(root):
            yield root
        return
    real = root.resolve()
    within = (*within, root.parent.resolve())
    if any(real in (each, *each.parents) for each in within):
        return
    for path in _listed(root):
        if not excluded(path):
            yield from _below(path, excluded, (*within, real))


def _listed(root: Path) -> Iterator[Path]:
    """Yields the files of a folder, and the folders that `_below` descends into separately."""
    known = _known_to_git(root)
    if known is not None:
        yield from known
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NEVER]
        yield from (Path(folder, name) for name in names)
        yield from (path for name in folders if (path := Path(folder, name)).is_symlink())


def _known_to_git(root: Path) -> list[Path] | None:
    """Returns the files that git tracks or would add; None outside a work tree, and for an ignored folder.

    Raises:
        UsageError: git fails, so the ignored files are unknown.
    """
    try:
        if _git(root, "check-ignore", "--quiet", str(root)).returncode == 0:
            return None
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except OSError:  # git is not installed
        return None
    if listed.returncode == 0:
        return [root / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    errors = listed.stderr.decode(errors="replace").strip()
    if "not a git repository" in errors:
        return None
    raise UsageError(
        f"git cannot list the files of {root}: {errors.partition(chr(10))[0].removeprefix('fatal: ')}",
        code="git-failed",
        hint=f"fix what `git -C {shlex.quote(str(root))} status` reports",
    )


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    english = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False, env=english)  # noqa: S607


def lacking(to: Path, entries: Sequence[Entry]) -> list[int]:
    """Returns the indices of the entries that a folder lacks, or has different versions of."""
    return [index for index, entry in enumerate(entries) if not _has(to, entry)]


def _has(to: Path, entry: Entry) -> bool:
    with suppress(OSError):
        return Entry.of(to / entry.path, to) == entry
    return False


def remove_former(to: Path, listed: FileList) -> None:
    """Removes files that were copied to a folder before and are not in the list any more.

    Raises:
        UsageError: the files in the folder have another origin.
    """
    listing = to / LIST_FILE
    try:
        kept = json.loads(listing.read_text(encoding="utf-8"))
        origin, before = str(kept["origin"]), set(kept["files"])
    except (OSError, ValueError, KeyError, TypeError):
        origin, before = listed.origin, set()
    if origin != listed.origin:
        raise UsageError(
            f"{to} contains files of {origin}, which the files of {listed.origin} would replace",
            code="folder-has-other-files",
            hint="name another folder, 'ssh: {to: …}', or remove this one",
        )
    now = {entry.path for entry in listed.entries}
    _remove_parts({to, *((to / path).parent for path in before | now)})
    for path in before - now:
        with suppress(OSError):
            (to / path).unlink()
            _remove_empty((to / path).parents[: len(PurePath(path).parts) - 1])
    to.mkdir(parents=True, exist_ok=True)
    write_whole(listing, json.dumps({"origin": listed.origin, "files": sorted(now)}).encode())


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders from the innermost outwards, together with Python's bytecode caches in them.

    Raises:
        OSError: a folder contains other files.
    """
    for folder in folders:
        if [path.name for path in folder.iterdir()] == [_CACHE]:
            shutil.rmtree(folder / _CACHE)
        folder.rmdir()


def _remove_parts(folders: Iterable[Path]) -> None:
    """Removes incomplete files that were left by killed processes of this host."""
    host = f".{socket.gethostname()}-"
    for folder in folders:
        for path in folder.glob(f"{host}*{_NEW}"):
            pid = path.name[len(host) : -len(_NEW)]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically: hosts may share a home folder, and read while another one writes."""
    new = path.with_name(f".{socket.gethostname()}-{os.getpid()}{_NEW}")
    new.write_bytes(data)
    new.replace(path)


class IncomingFile:
    """A file that is received in pieces. It appears under its name when it is complete.

    Args:
        to: the target folder of all files.
        entry: the file.
    """

    def __init__(self, to: Path, entry: Entry) -> None:
        self._path = to / entry.path
        self._entry = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._new = self._path.with_name(f".{socket.gethostname()}-{os.getpid()}{_NEW}")
        self._file = self._new.open("wb")

    def drop(self) -> None:
        """Discards the received pieces."""
        self._file.close()
        self._new.unlink(missing_ok=True)

    def add(self, data: bytes, *, last: bool) -> None:
        """Writes the next piece."""
        self._file.write(data)
        if last:
            self._file.close()
            self._new.chmod(self._entry.mode)
            modified = self._entry.modified * 1000
            os.utime(self._new, ns=(modified, modified))
            self._new.replace(self._path)


def pieces(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yields a file's content in pieces, each with whether it is the last."""
    with path.open("rb") as file:
        data = file.read(CHUNK)
        while True:
            following = file.read(CHUNK)
            yield data, not following
            if not following:
                return
            data = following
