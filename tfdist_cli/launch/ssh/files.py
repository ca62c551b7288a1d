"""Copying files to hosts: what there is to copy, what a host lacks of it, and taking it in.

As with rsync, a file is taken to be the same when its size, its time of change and its permissions are. What was copied
before and is no longer here is removed there; nothing else is. The directories of runs stay where they are.
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
"""In the folder that files are copied to: what was, and whose it is."""
_CACHE = "__pycache__"
_NEVER = (".git", _CACHE)
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


@dataclass(frozen=True)
class Listed:
    """The files of a folder on a host.

    Args:
        origin: whose they are, in words that nobody else's files have.
        entries: the files.
    """

    origin: str = ""
    entries: tuple[Entry, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Listed:
        """Reads what `as_json` gives."""
        return cls(fields["origin"], tuple(Entry(*entry) for entry in fields["files"]))

    def as_json(self) -> dict[str, Any]:
        """In plain JSON types."""
        return {"origin": self.origin, "files": [entry.as_json() for entry in self.entries]}


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
    patterns = [pattern.rstrip("/").removeprefix("./") for pattern in exclude]
    found: dict[str, Entry] = {}
    for root in roots:
        for path in _below(root, partial(_is_excluded, root, patterns)):
            if path.is_file() and not _is_of_a_run(path.parent, root):
                entry = Entry.of(path, base)
                found[entry.path] = entry
    return [found[path] for path in sorted(found)]


def _is_excluded(root: Path, patterns: Sequence[str], path: Path) -> bool:
    inner = PurePath(root.name) if path == root else path.relative_to(root)
    paths = [inner, *inner.parents][: len(inner.parts)]
    return any(fnmatch(str(each), pattern) or fnmatch(each.name, pattern) for each in paths for pattern in patterns)


@cache
def _is_of_a_run(folder: Path, root: Path) -> bool:
    """Whether a folder is a run's directory, or in one."""
    if folder == root or root not in folder.parents:
        return False
    return (folder / LOCK_FILE).exists() or _is_of_a_run(folder.parent, root)


def _below(root: Path, excluded: Callable[[Path], bool], within: tuple[Path, ...] = ()) -> Iterator[Path]:
    """What is in a folder, and in those that it has from elsewhere: links, submodules, repositories of their own.

    Args:
        root: the folder, or a file.
        excluded: whether something is left out.
        within: the folders that have led here, without links; a link back to what holds one of them is left out.
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
    """The files of a folder, and the folders that it has from elsewhere."""
    known = _known_to_git(root)
    if known is not None:
        yield from known
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NEVER]
        yield from (Path(folder, name) for name in names)
        yield from (path for name in folders if (path := Path(folder, name)).is_symlink())


def _known_to_git(root: Path) -> list[Path] | None:
    """What of a work tree git keeps or would add; None outside of one, and for what it ignores altogether.

    Raises:
        UsageError: git does not say, so that what it ignores is not known.
    """
    try:
        if _git(root, "check-ignore", "--quiet", str(root)).returncode == 0:
            return None
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except OSError:  # there is no git
        return None
    if listed.returncode == 0:
        return [root / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    said = listed.stderr.decode(errors="replace").strip()
    if "not a git repository" in said:
        return None
    raise UsageError(
        f"git does not say which files of {root} it ignores: {said.partition(chr(10))[0].removeprefix('fatal: ')}",
        hint=f"mend what `git -C {shlex.quote(str(root))} status` tells",
    )


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    english = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False, env=english)  # noqa: S607


def lacking(to: Path, entries: Sequence[Entry]) -> list[int]:
    """Which files a folder does not have as they are, by their places in the list."""
    return [index for index, entry in enumerate(entries) if not _has(to, entry)]


def _has(to: Path, entry: Entry) -> bool:
    with suppress(OSError):
        return Entry.of(to / entry.path, to) == entry
    return False


def remove_former(to: Path, listed: Listed) -> None:
    """Removes what was copied to a folder before and is not among the files any more.

    Raises:
        UsageError: what is there was copied from elsewhere.
    """
    listing = to / LIST_FILE
    try:
        kept = json.loads(listing.read_text(encoding="utf-8"))
        origin, before = str(kept["origin"]), set(kept["files"])
    except (OSError, ValueError, KeyError, TypeError):
        origin, before = listed.origin, set()
    if origin != listed.origin:
        raise UsageError(
            f"{to} has the files of {origin}, and those of {listed.origin} would take their place",
            hint="name another folder, 'ssh: {to: …}', or remove that one",
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
    """Removes folders from the innermost outwards, until one holds more than what Python has compiled of its modules.

    Raises:
        OSError: one does.
    """
    for folder in folders:
        if [path.name for path in folder.iterdir()] == [_CACHE]:
            shutil.rmtree(folder / _CACHE)
        folder.rmdir()


def _remove_parts(folders: Iterable[Path]) -> None:
    """Removes the parts of files that processes of this host have left, which were killed as they wrote them."""
    host = f".{socket.gethostname()}-"
    for folder in folders:
        for path in folder.glob(f"{host}*{_NEW}"):
            pid = path.name[len(host) : -len(_NEW)]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)


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

    def drop(self) -> None:
        """Forgets what there is of it."""
        self._file.close()
        self._new.unlink(missing_ok=True)

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
