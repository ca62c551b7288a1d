"""Uploads a run directory while the run is on: what has changed, in an order that suits readers.

Readers never see a part of a file. What a file refers to is uploaded before it: the files of a checkpoint before its
seal, the result of a run before the event that it has ended, and everything before the events that mention it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tfdist_cli.launch.run.directory import (
    EVENTS_FILE,
    LEASE_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    PLAN_FILE,
    RESULT_FILE,
    SENT_FILE,
)
from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.storage.remote import RemoteFolder

PACE = 20
"""A file that takes t seconds to upload is uploaded again after 20 t seconds at the earliest."""
_GROWS = (".jsonl", ".log", ".csv")
"""Files to which lines are appended: they are uploaded up to the end of a line."""
_SMALL = 16 << 20
"""A file of fewer bytes is copied before it is uploaded, since it may change meanwhile."""
_BLOCK = 1 << 20
_QUIET = 10.0
"""Seconds after which a larger file that has not changed is taken to be complete."""
_LAST = ("saved_model.pb", "model.xml", "state.json")
"""Files that say that the others in their folder are complete."""
_OWN = (LOCK_FILE, LEASE_FILE, ORIGIN_FILE)
_NAMED = 5
"""Files that a message names; of more, their number."""

Stamp = tuple[int, int]
"""The size of a file, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class _File:
    name: str
    path: Path
    stamp: Stamp


class UnreadableFiles(OSError):
    """Files of a run directory that this process may not read, or cannot: all others are uploaded.

    Args:
        reasons: the name of each file or folder, and why it cannot be read.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        named = [f"{name} ({reason})" for name, reason in list(reasons.items())[:_NAMED]]
        more = f" and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
        super().__init__(errno.EACCES, f"cannot read {', '.join(named)}{more}")
        self.names = tuple(reasons)


class FolderUpload:
    """Uploads the files of a run directory that have changed since the last time.

    Args:
        local: the directory.
        remote: where it is stored.
        skipped: names of folders that the tasks upload themselves.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        local: Path,
        remote: RemoteFolder,
        skipped: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._remote = remote
        self._skipped = tuple(f"{name}/" for name in skipped)
        self._clock = clock
        self._sent = read_sent(local)
        self._due: dict[str, float] = {}
        self._unreadable: dict[str, str] = {}
        self.not_sent: list[str] = []
        """The names of the files whose last changes are not uploaded."""

    def upload_changes(self, *, last: bool = False, stopped: Callable[[], bool] = lambda: False) -> None:
        """Uploads what has changed.

        Args:
            last: whether files are uploaded although they were uploaded a short while ago.
            stopped: whether to end before the next file.

        Raises:
            UnreadableFiles: files cannot be read here; the others are uploaded.
            OSError: the service has failed for a file; those after it were not tried.
        """
        if not (self._local / PLAN_FILE).exists():
            return  # the directory was removed: its copy must not be
        files = self.changed()
        try:
            for file in files:
                if stopped():
                    return
                if last or self._due.get(file.name, 0.0) <= self._clock():
                    self._upload_readable(file)
            self._delete_removed()
        finally:
            write_sent(self._local, self._sent)
        if self._unreadable:
            raise UnreadableFiles(self._unreadable)

    def changed(self) -> list[_File]:
        """Returns the files that are to be uploaded, in this order."""
        self._unreadable = {}
        events = self._events()
        files = [file for file in self._files() if self._sent.get(file.name) != file.stamp]
        files += [events] if events and self._sent.get(events.name) != events.stamp else []
        self.not_sent = [*self._unreadable, *(file.name for file in files)]
        return files

    def _events(self) -> _File | None:
        """The events so far. Later ones may mention files that this round does not upload."""
        with suppress(FileNotFoundError):
            return _File(EVENTS_FILE, self._local / EVENTS_FILE, _stamp(self._local / EVENTS_FILE))
        return None

    def _files(self) -> list[_File]:
        found = []
        for name, path in _regular_files(self._local, self._cannot_list):
            if name != EVENTS_FILE and not name.startswith(self._skipped):
                with suppress(FileNotFoundError):
                    found.append(_File(name, path, _stamp(path)))
        return sorted(found, key=lambda file: (_rank(file.name), file.name))

    def _cannot_list(self, error: OSError) -> None:
        """Notes a folder that cannot be listed, or a file in it. One that was removed meanwhile is none."""
        name = str(Path(error.filename).relative_to(self._local))
        if not isinstance(error, FileNotFoundError) and not f"{name}/".startswith(self._skipped):
            self._unreadable[name] = error.strerror or str(error)

    def _upload_readable(self, file: _File) -> None:
        """Uploads a file, unless it cannot be read, or says that files are complete of which one cannot be read."""
        folder = file.name[: -len(file.path.name)]
        if _rank(file.name) == 1 and any(name.startswith(folder) for name in self._unreadable):
            return
        try:
            self._upload(file)
        except _NotReadableError as error:
            self._unreadable[file.name] = str(error)
        else:
            self.not_sent.remove(file.name)

    def _upload(self, file: _File) -> None:
        began = self._clock()
        try:
            if file.stamp[0] >= _SMALL and time.time() - file.stamp[1] / 1e9 > _QUIET:
                next(_blocks(file.path, 1), b"")  # the service's library does not say which side has failed
                self._remote.upload(file.path, file.name)
            else:
                with _copied(file) as copy:
                    self._remote.upload(Path(copy.name), file.name)
        except FileNotFoundError:
            if file.path.exists():
                raise  # the bucket is missing
            return  # it was removed meanwhile
        self._sent[file.name] = file.stamp
        self._due[file.name] = self._clock() + PACE * (self._clock() - began)

    def _delete_removed(self) -> None:
        """Deletes objects whose files were removed, such as old checkpoints: a folder's seal first."""
        gone = [name for name in self._sent if _is_gone(self._local / name)]
        for name in sorted(gone, key=lambda name: (-_rank(name), name)):
            self._remote.delete([name])
            del self._sent[name]


def read_sent(local: Path) -> dict[str, Stamp]:
    """Returns the size and the time of each file that was uploaded."""
    with suppress(OSError, ValueError, TypeError):
        return {name: (int(size), int(changed)) for name, (size, changed) in read_object(local / SENT_FILE).items()}
    return {}


def write_sent(local: Path, sent: Mapping[str, Stamp]) -> None:
    """Writes the size and the time of each file that is uploaded; without it all are uploaded again."""
    new = local / f"{SENT_FILE}.new"
    with suppress(OSError):
        new.write_text(json.dumps(sent), encoding="utf-8")
        new.replace(local / SENT_FILE)


def stamps(local: Path) -> dict[str, Stamp]:
    """Returns the size and the time of each file of a directory."""

    def fail(error: OSError) -> None:
        raise error

    return {name: _stamp(path) for name, path in _regular_files(local, fail)}


def _regular_files(folder: Path, failed: Callable[[OSError], None]) -> Iterator[tuple[str, Path]]:
    """Yields the files of a run, without links, hidden files, and files that are about one machine.

    Args:
        folder: the run directory.
        failed: is called with the error of a folder that cannot be listed.
    """
    for root, folders, names in os.walk(folder, onerror=failed):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            path = Path(root, name)
            relative = str(path.relative_to(folder))
            own = relative in _OWN or relative.startswith("request-")
            if name.startswith(".") or own:
                continue
            try:
                regular = stat.S_ISREG(path.lstat().st_mode)
            except OSError as error:
                failed(error)
                continue
            if regular:
                yield relative, path


def _is_gone(path: Path) -> bool:
    """Whether a file was removed. One in a folder that cannot be read may be there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except PermissionError:
        pass
    return False


def _rank(name: str) -> int:
    return 2 if name == RESULT_FILE else 1 if name.rpartition("/")[2] in _LAST else 0


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


class _NotReadableError(Exception):
    """A file of the run directory cannot be read; the text is the reason."""


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    """Yields the beginning of a file.

    Raises:
        FileNotFoundError: it was removed.
        _NotReadableError: it cannot be read.
    """
    try:
        with path.open("rb") as source:
            while size > 0 and (block := source.read(min(size, _BLOCK))):
                yield block
                size -= len(block)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _NotReadableError(error.strerror or error) from error


def _copied(file: _File) -> IO[bytes]:
    """Copies a file as it was when it was listed; of lines only whole ones."""
    copy = tempfile.NamedTemporaryFile(prefix="tfdist-upload-")  # noqa: SIM115 the caller closes it
    copy.writelines(_blocks(file.path, file.stamp[0]))
    if file.path.suffix in _GROWS:
        copy.truncate(_end_of_lines(copy))
    copy.flush()
    return copy


def _end_of_lines(file: IO[bytes]) -> int:
    """Returns the position after the last line end."""
    at = file.tell()
    while at > 0:
        start = max(0, at - _BLOCK)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    return 0
