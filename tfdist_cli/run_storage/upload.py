"""Uploads a run directory while the run is on: what has changed, in an order that suits readers.

Readers never see a part of a file. What a file refers to is uploaded before it: the files of a checkpoint before its
seal, the result of a run before the event that it has ended, and everything before the events that mention it.
"""

from __future__ import annotations

import json
import os
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

Stamp = tuple[int, int]
"""The size of a file, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class _File:
    name: str
    path: Path
    stamp: Stamp


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
        self.not_sent: list[str] = []
        """The names of the files whose last changes are not uploaded."""

    def upload_changes(self, *, last: bool = False, stopped: Callable[[], bool] = lambda: False) -> None:
        """Uploads what has changed.

        Args:
            last: whether files are uploaded although they were uploaded a short while ago.
            stopped: whether to end before the next file.

        Raises:
            OSError: a file could not be uploaded; those after it were not tried.
        """
        if not (self._local / PLAN_FILE).exists():
            return  # the directory was removed: its copy must not be
        files = self.changed()
        try:
            for file in files:
                if stopped():
                    return
                if last or self._due.get(file.name, 0.0) <= self._clock():
                    self._upload(file)
                    self.not_sent.remove(file.name)
            self._delete_removed()
        finally:
            write_sent(self._local, self._sent)

    def changed(self) -> list[_File]:
        """Returns the files that are to be uploaded, in this order."""
        events = self._events()
        files = [file for file in self._files() if self._sent.get(file.name) != file.stamp]
        files += [events] if events and self._sent.get(events.name) != events.stamp else []
        self.not_sent = [file.name for file in files]
        return files

    def _events(self) -> _File | None:
        """The events so far. Later ones may mention files that this round does not upload."""
        with suppress(FileNotFoundError):
            return _File(EVENTS_FILE, self._local / EVENTS_FILE, _stamp(self._local / EVENTS_FILE))
        return None

    def _files(self) -> list[_File]:
        found = []
        for name, path in _regular_files(self._local):
            if name != EVENTS_FILE and not name.startswith(self._skipped):
                with suppress(FileNotFoundError):
                    found.append(_File(name, path, _stamp(path)))
        return sorted(found, key=lambda file: (_rank(file.name), file.name))

    def _upload(self, file: _File) -> None:
        began = self._clock()
        try:
            if file.stamp[0] >= _SMALL and time.time() - file.stamp[1] / 1e9 > _QUIET:
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
        gone = [name for name in self._sent if not (self._local / name).exists()]
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
    return {name: _stamp(path) for name, path in _regular_files(local)}


def _regular_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a run, without links, hidden files, and files that are about one machine."""
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            path = Path(root, name)
            relative = str(path.relative_to(folder))
            own = relative in _OWN or relative.startswith("request-")
            if not name.startswith(".") and not own and path.is_file() and not path.is_symlink():
                yield relative, path


def _rank(name: str) -> int:
    return 2 if name == RESULT_FILE else 1 if name.rpartition("/")[2] in _LAST else 0


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _copied(file: _File) -> IO[bytes]:
    """Copies a file as it was when it was listed; of lines only whole ones."""
    copy = tempfile.NamedTemporaryFile(prefix="tfdist-upload-")  # noqa: SIM115 the caller closes it
    left = file.stamp[0]
    with file.path.open("rb") as source:
        while left > 0 and (block := source.read(min(left, _BLOCK))):
            copy.write(block)
            left -= len(block)
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
