"""The process that uploads a run directory: it can neither stop nor slow the job, and goes on if the launcher dies."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tfdist_cli.errors import TfdistError
from tfdist_cli.run_storage.lease import ENDED, LOST, RENEWAL_SECONDS, Lease
from tfdist_cli.run_storage.requests import RequestRelay
from tfdist_cli.run_storage.upload import FolderUpload, UnreadableFiles
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import RETRY_SECONDS, Retry, StorageError

PERIOD = 10.0
"""Seconds between two uploads."""
_PATIENCE = 15.0
"""Seconds for which a request is repeated during the run; the next upload tries again."""

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Task:
    """What the process does.

    Args:
        local: the run directory.
        url: where it is stored.
        lease: the launch.
        skipped: names of folders that the tasks upload themselves.
        period: seconds between two uploads.
        patience: seconds for which a request is repeated after the job.
    """

    local: Path
    url: Url
    lease: Lease
    skipped: tuple[str, ...] = ()
    period: float = PERIOD
    patience: float = RETRY_SECONDS

    def as_argument(self) -> str:
        """The task as an argument of a command."""
        fields = {"local": str(self.local), "url": str(self.url), "lease": vars(self.lease)}
        return json.dumps({**fields, "skipped": self.skipped, "period": self.period, "patience": self.patience})

    @classmethod
    def of_argument(cls, text: str) -> Task:
        """Reads `as_argument`."""
        fields = json.loads(text)
        fields |= {"local": Path(fields["local"]), "url": Url(fields["url"]), "skipped": tuple(fields["skipped"])}
        return cls(**{**fields, "lease": Lease.parse(fields["lease"])})


class _Ended:
    """Waits for the end of the job: the launcher writes its exit code, or its pipe breaks."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.event = threading.Event()
        self.state = LOST
        threading.Thread(target=self._read, args=(pipe,), name="launcher-watch", daemon=True).start()

    def _read(self, pipe: BinaryIO) -> None:
        if pipe.readline().strip():
            self.state = ENDED
        self.event.set()


def upload_run(task: Task, pipe: BinaryIO) -> str:
    """Uploads a run directory until the job has ended, and then once more.

    Args:
        task: what is uploaded.
        pipe: tells the end of the job.

    Returns:
        What is not uploaded, and why; empty if everything is.
    """
    with suppress(OSError):
        os.nice(10)  # the job comes first
    ended, taken, told = _Ended(pipe), threading.Event(), set[str]()

    def pause(seconds: float) -> None:
        if ended.event.wait(seconds):
            raise StorageError("the job has ended")

    patient = Retry(_PATIENCE, sleep=pause)
    during = FolderUpload(task.local, RemoteFolder(task.url, patient), task.skipped)
    relay = RequestRelay(task.local, task.url, task.lease)
    threading.Thread(target=_renew, args=(task, ended.event, taken), name="lease", daemon=True).start()
    threading.Thread(target=relay.run, args=(ended.event, task.period), name="requests", daemon=True).start()
    while not taken.is_set():
        _try(during, ended.event, told)
        if relay.pause(ended.event, task.period):
            break
    ended.event.wait()
    remote = RemoteFolder(task.url, Retry(task.patience))
    last = FolderUpload(task.local, remote, task.skipped)
    last.changed()  # for the message, should the service not answer
    try:
        if task.lease.is_taken(remote):
            return f"another launch has taken over {task.url}"
        problem = _unreadable(last)
        task.lease.written(remote, ended.state)
    except OSError as error:
        with suppress(OSError):  # others need not wait for this launch
            task.lease.written(RemoteFolder(task.url, Retry(0)), ended.state)
        if not last.not_sent:
            return f"all of its files are there, but not that it has ended: {error.strerror or error}"
        return f"{len(last.not_sent)} files of {task.local} are not in {task.url}: {error.strerror or error}"
    return problem


def _unreadable(last: FolderUpload) -> str:
    """Uploads the rest of the run. Returns which files cannot be read; empty if all can."""
    try:
        last.upload_changes(last=True)
    except UnreadableFiles as error:
        return f"{error.strerror}; all other files are there"
    return ""


def _try(upload: FolderUpload, ended: threading.Event, told: set[str]) -> None:
    """Uploads what has changed.

    Args:
        upload: the run directory.
        ended: whether the job has ended.
        told: the names of unreadable files that the log has; new ones are added.
    """
    try:
        upload.upload_changes(stopped=ended.is_set)
    except UnreadableFiles as error:
        if not told.issuperset(error.names):
            log.warning("%s; the other files are uploaded", error.strerror)
        told.update(error.names)
    except OSError as error:
        log.warning("%s; tried again later", error.strerror or error)


def _renew(task: Task, ended: threading.Event, taken: threading.Event) -> None:
    """Gives signs of life, until another launch has taken over."""
    remote = RemoteFolder(task.url, Retry(0))
    while not ended.wait(RENEWAL_SECONDS):
        try:
            if task.lease.is_taken(remote):
                taken.set()
                return
            task.lease.written(remote)
        except OSError as error:
            log.warning("%s", error.strerror or error)


def main(argument: str) -> int:
    """Runs the process. What is not uploaded is printed on standard output."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    try:
        problem = upload_run(Task.of_argument(argument), sys.stdin.buffer)
    except TfdistError as error:
        problem = error.message
    sys.stdout.write(problem)
    return 1 if problem else 0
