"""Requests to the launcher of a run in a storage service, from any machine.

    s3://bucket/run/requests/ID.json    a request, with the id of the launch that it is for

The process that uploads the run takes requests out of the service, and passes them on to the launcher of its machine.
The launcher's answers are in `events.jsonl`, which is uploaded soon after that.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.run.directory import EVENTS_FILE, LEASE_FILE
from tfdist_cli.launch.run.history import RunView, runs_elsewhere
from tfdist_cli.launch.run.requests import SIGNAL, Request, as_object, new_id, parse_request, post_request
from tfdist_cli.protocol.run_files import parse_object, read_object
from tfdist_cli.run_storage.download import REQUESTS, RunCopy, unreachable
from tfdist_cli.run_storage.lease import ENDED, Lease
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import Retry

_STOP = "stop"
_ID = re.compile(r"[0-9a-f]{32}")
"""A request's id, which becomes a part of a file's name here."""
_AGAIN = 0.5
"""Seconds between two signals to a launcher: the second SIGINT makes it kill its tasks at once."""
_UNANSWERED = 30.0
"""Seconds after which a request that the launcher has not taken is dropped."""
_SOON = 1.0
"""Seconds between two uploads while a request is answered."""
_ANSWERED = 15.0
"""Seconds after a request in which its answer is expected."""

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class StopRequest:
    """A request to stop a run.

    Args:
        request: its id.
        now: whether to kill the tasks at once, without a checkpoint.
    """

    request: str
    now: bool = False


class StoredContact:
    """The launcher of a run in a storage service; see `launch.run.requests.Contact`.

    Args:
        url: the run's address.
        folder: a copy of the run directory.
    """

    period = 2.0

    def __init__(self, url: Url, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._copy = RunCopy(url, folder, (LEASE_FILE, EVENTS_FILE))
        self._remote = RemoteFolder(url)
        self._lease = _lease_in(folder)
        self.events = folder / EVENTS_FILE

    @contextmanager
    def post(self, request: Request | StopRequest) -> Iterator[None]:
        """Writes the request into the service.

        Raises:
            UsageError: the service cannot be used.
        """
        launch = self._lease.launch if self._lease else ""
        name = f"{REQUESTS}/{request.request}.json"
        content = ({"kind": _STOP, "now": request.now} if isinstance(request, StopRequest) else as_object(request)) | {
            "launch": launch
        }
        try:
            self._remote.write(name, json.dumps(content).encode())
        except FileNotFoundError:
            pass  # the launcher has taken it before it was read again
        except OSError as error:
            raise unreachable(self._url, error) from error
        try:
            yield
        finally:
            with suppress(OSError):  # a later launch ignores it
                RemoteFolder(self._url, Retry(0)).delete([name])

    def look(self, *, unanswered: bool = False) -> bool:  # noqa: ARG002 the launcher's machine signals it
        """Downloads the new events, and returns whether the launch that was found first is alive."""
        self._copy.refresh()
        lease = _lease_in(self._folder)
        same = lease is not None and self._lease is not None and lease.launch == self._lease.launch
        return same and runs_elsewhere(self._folder)

    def stop(self, view: RunView, *, now: bool, timeout: float) -> bool:
        """Stops the run, and waits for at most so many seconds until all of it is uploaded; returns whether it is.

        Raises:
            TfdistError: its launcher has disappeared.
        """
        deadline = time.monotonic() + timeout
        if self.look():
            with self.post(StopRequest(new_id(), now)):
                while self.look():
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(self.period)
        lease = _lease_in(self._folder)
        if lease is None or (lease == self._lease or lease.state != ENDED):
            raise self.lost(view)
        return True

    def lost(self, view: RunView) -> TfdistError:
        """Returns the error of a launcher that gives no sign of life."""
        lease = self._lease
        host = lease.host if lease else "its machine"
        where = f" of pid {lease.pid} on {host}" if lease else ""
        told = f"gave its last sign of life at {lease.time}" if lease else "gave no sign of life"
        return TfdistError(
            f"the launcher{where} {told}, and left no result in {view.shown}",
            code="launcher-lost",
            hint=f"`tfdist stop` with the run's local folder, on {host}, ends tasks that are left; "
            f"launch again with --run-dir {view.shown} to resume the run on any machine",
        )


def _lease_in(folder: Path) -> Lease | None:
    with suppress(OSError, ValueError):
        return Lease.parse(read_object(folder / LEASE_FILE))
    return None


def _signal(pid: int, number: signal.Signals) -> None:
    """Signals the launcher, which has started this process."""
    if os.getppid() == pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class RequestRelay:
    """Passes requests in the service on to the launcher of this machine.

    Args:
        local: the run directory.
        url: its address.
        lease: the launch.
        send: signals a process.
    """

    def __init__(
        self, local: Path, url: Url, lease: Lease, send: Callable[[int, signal.Signals], None] = _signal
    ) -> None:
        self._local = local
        self._remote = RemoteFolder(url, Retry(0))
        self._lease = lease
        self._send = send
        self._answering_until = 0.0

    def run(self, ended: threading.Event, period: float) -> None:
        """Looks for requests until the job has ended."""
        while not ended.wait(period):
            try:
                for value in self._take():
                    self._answering_until = time.monotonic() + _ANSWERED
                    self._pass_on(value, ended)
            except OSError as error:
                log.warning("%s", error.strerror or error)

    def pause(self, ended: threading.Event, seconds: float) -> bool:
        """Waits until the next upload is due: soon after a request, so that its answer arrives.

        Returns:
            Whether the job has ended.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if ended.wait(min(left, _SOON)):
                return True
            if time.monotonic() < self._answering_until:
                return False
        return ended.is_set()

    def _take(self) -> Iterator[Mapping[str, Any]]:
        """Takes the requests for this launch; others are for one that has ended."""
        for name in self._remote.sizes(REQUESTS):
            with suppress(FileNotFoundError, ValueError):
                value = parse_object(self._remote.read(name))
                if value.get("launch") == self._lease.launch:
                    yield value
            self._remote.delete([name])

    def _pass_on(self, value: Mapping[str, Any], ended: threading.Event) -> None:
        if value.get("kind") == _STOP:
            now = value.get("now") is True
            self._send(self._lease.pid, signal.SIGINT if now else signal.SIGTERM)
            if now and not ended.wait(_AGAIN):
                self._send(self._lease.pid, signal.SIGINT)
        elif _ID.fullmatch(str(value.get("request"))) and (request := parse_request(value)):
            deadline = time.monotonic() + _UNANSWERED
            with post_request(self._local, request) as path:
                while path.exists() and time.monotonic() < deadline:
                    self._send(self._lease.pid, SIGNAL)
                    if ended.wait(_AGAIN):
                        return
