"""Copies of run directories in storage services: to resume a run, and for the commands that read runs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import (
    CHECKPOINTS,
    EVENTS_FILE,
    LEASE_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    PLAN_FILE,
    RESULT_FILE,
)
from tfdist_cli.launch.run.history import METRICS_FILE
from tfdist_cli.launch.usage import RESOURCES_FILE
from tfdist_cli.protocol.records import TASK_FILE
from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.run_storage.upload import stamps, write_sent
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder

STATE = (
    *(PLAN_FILE, LEASE_FILE, EVENTS_FILE, METRICS_FILE, RESULT_FILE, RESOURCES_FILE),
    f"attempt_*/*/{TASK_FILE}",
)
"""Patterns of the files that have the state of a run."""
REQUESTS = "requests"
"""The folder of requests to the launcher."""
_GROWS = re.compile(r".*\.(jsonl|log)|.*tfevents[^/]*")
"""Names of files to which data is appended: of these only new bytes are downloaded."""
_OVERLAP = 512
"""Bytes of the copy that are compared with the file: a line of the metrics, with its time."""
_FIRST = (LEASE_FILE, EVENTS_FILE)
"""The files that are uploaded last are downloaded first: then they mention nothing that is not there yet."""
CLOCK_TOLERANCE = 300.0
"""Seconds by which the clocks of this machine and of a service that does not tell its time may differ."""
_ATTEMPT = re.compile(r"(attempt_[0-9]+)/")
_SEAL = re.compile(rf"({CHECKPOINTS}/step-[0-9]+)/state\.json")


def _dated(file: Path) -> tuple[bytes, float] | None:
    """Returns the content of a file, and when it was modified; None if it does not exist."""
    try:
        return file.read_bytes(), file.stat().st_mtime
    except FileNotFoundError:
        return None


class RunCopy:
    """A copy of a run directory, or of a part of it.

    Args:
        url: the run's address.
        folder: where the copy is.
        wanted: patterns of the files that it has.
    """

    def __init__(self, url: Url, folder: Path, wanted: Sequence[str]) -> None:
        self._remote = RemoteFolder(url)
        self._wanted = tuple(wanted)
        self.path = folder

    def refresh(self) -> None:
        """Downloads what has changed.

        Raises:
            UsageError: there is no run, or the service cannot be used.
        """
        try:
            sizes = self._remote.sizes()
            if PLAN_FILE not in sizes:
                raise UsageError(
                    f"there is no run in {self._remote.url}: it has no {PLAN_FILE}",
                    code="not-a-run-dir",
                    hint="give an address that `tfdist list` shows, such as s3://bucket/runs/digits-20260102-030405",
                )
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_origin(self.path, self._remote.url)
            chosen = [name for name in sizes if any(fnmatchcase(name, pattern) for pattern in self._wanted)]
            lease = _dated(self.path / LEASE_FILE)
            for name in sorted(chosen, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    self._update(name, sizes[name])
                    if name == LEASE_FILE:
                        self._date_lease(lease)
        except OSError as error:
            raise unreachable(self._remote.url, error) from error
        make_folders(self.path, sizes)

    def _update(self, name: str, size: int) -> None:
        file = self.path / name
        before = file.stat().st_size if file.exists() else -1
        if _GROWS.fullmatch(name) and 0 < before <= size:
            if not self._append(name, before, size):
                self._remote.download(name, file)
        elif before != size or file.suffix == ".json":
            self._remote.download(name, file)

    def _date_lease(self, before: tuple[bytes, float] | None) -> None:
        """Sets when the copy of the lease was modified: when the launcher wrote it, by the clock of this machine.

        A service that does not tell its time tells whether the lease has changed since the last time. The first time,
        the clocks of the service and of this machine are compared, with a tolerance in favour of the launcher.

        Args:
            before: the lease of the last time, and its date; None the first time.
        """
        file = self.path / LEASE_FILE
        content = file.read_bytes()
        if b'"running"' not in content:
            return  # that it has ended needs no date
        age = self._remote.age(LEASE_FILE)
        now = time.time()
        if age is not None:
            date = now - age
        elif before is None:
            date = min(now, self._remote.modified(LEASE_FILE) + CLOCK_TOLERANCE)
        else:
            date = before[1] if before[0] == content else now
        os.utime(file, (date, date))

    def _append(self, name: str, before: int, size: int) -> bool:
        """Downloads the new bytes of a file that has grown; returns False if it has other bytes before them.

        A chief that resumes from a checkpoint replaces the metrics, and they grow again.
        """
        begin = max(0, before - _OVERLAP)
        if before == size and name != METRICS_FILE:
            return True
        found = self._remote.read(name, begin, size)
        with (self.path / name).open("r+b") as opened:
            opened.seek(begin)
            if opened.read() != found[: before - begin]:
                return False
            opened.write(found[before - begin :])
        return True


def download_run(remote: RemoteFolder, folder: Path, sizes: Mapping[str, int], skipped: Sequence[str]) -> None:
    """Downloads a run directory so that a launch can resume it here, without the logs of its earlier attempts.

    Args:
        remote: the run directory.
        folder: a folder that does not exist.
        sizes: the objects in it.
        skipped: names of folders that the tasks download themselves.

    Raises:
        OSError: it could not be downloaded.
    """
    left_out = tuple(f"{name}/" for name in (*skipped, REQUESTS))
    for name in sizes:
        if not name.startswith(left_out) and not _ATTEMPT.match(name) and name not in (LEASE_FILE, LOCK_FILE):
            remote.download(name, folder / name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    make_folders(folder, sizes)
    write_sent(folder, stamps(folder))


def make_folders(folder: Path, names: Mapping[str, int]) -> None:
    """Makes the folders that tell of a run's attempts and complete checkpoints, also where their files are missing."""
    for name in names:
        if found := _ATTEMPT.match(name) or _SEAL.fullmatch(name):
            (folder / found[1]).mkdir(parents=True, exist_ok=True)


def runs_in_service(url: Url) -> Iterator[Url]:
    """Yields the runs in a folder of a storage service, by name.

    Raises:
        UsageError: the service cannot be used.
    """
    try:
        names = RemoteFolder(url).sizes()
    except OSError as error:
        raise unreachable(url, error) from error
    for name in names:
        run, _, file = name.partition("/")
        if file == PLAN_FILE:
            yield url / run


def write_origin(local: Path, url: Url, launch: str = "") -> None:
    """Writes where a local run directory is stored, and the launch that has uploaded it last."""
    text = json.dumps({"url": str(url), "launch": launch})
    (local / ORIGIN_FILE).write_text(text, encoding="utf-8")


def origin_of(local: Path) -> tuple[Url, str] | None:
    """Returns where a local run directory is stored, and the launch that has uploaded it last; None if nowhere."""
    with suppress(OSError, ValueError, KeyError):
        found = read_object(local / ORIGIN_FILE)
        return Url(found["url"]), str(found["launch"])
    return None


def unreachable(url: Url, error: OSError) -> UsageError:
    """The error of a service that cannot be used."""
    return UsageError(
        f"{url} cannot be used: {error.strerror or error}",
        code="storage-unreachable",
        hint="check the address, the network and the credentials",
    )
