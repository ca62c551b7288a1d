"""Requests to a launcher: files in the run's directory, which another process writes and announces by a signal.

The launcher answers a request in `events.jsonl`. It removes the file when it reads it; a file that it has not read is
removed by the process that wrote it.
"""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.run.directory import EVENTS_FILE
from tfdist_cli.launch.run.history import RunView, launcher_of
from tfdist_cli.protocol.run_files import number, open_file, parse_lines, read_object, whole
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.task_id import TaskId

SIGNAL = signal.SIGURG
"""The signal that announces a request. A process without a handler for it ignores it."""
_FILES = "request-*.json"


@dataclass(frozen=True)
class ScaleRequest:
    """A request for other numbers of tasks while a job runs.

    Args:
        request: the id that its answer refers to.
        replicas: the wanted number of tasks of each role that changes.
        dry_run: whether to answer only, and change nothing.
    """

    request: str
    replicas: Mapping[Role, int]
    dry_run: bool = False

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> ScaleRequest | None:
        """Reads a request from its file; None if it is malformed."""
        replicas = value.get("replicas")
        if not isinstance(replicas, dict) or not all(role in ROLES for role in replicas):
            return None
        if not all((whole(count) or 0) >= 0 and whole(count) is not None for count in replicas.values()):
            return None
        return cls(str(value.get("request")), replicas, bool(value.get("dry_run")))


@dataclass(frozen=True)
class ProfileRequest:
    """A request to profile a running task.

    Args:
        request: the id that its answer refers to.
        task: the task's name.
        seconds: how long.
    """

    request: str
    task: str
    seconds: float

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> ProfileRequest | None:
        """Reads a request from its file; None if it is malformed."""
        seconds = number(value.get("seconds"))
        with suppress(ValueError):
            TaskId.parse(str(value.get("task")))
            return None if seconds is None else cls(str(value.get("request")), str(value["task"]), seconds)
        return None


Request = ScaleRequest | ProfileRequest
_KINDS: Mapping[str, type[ScaleRequest | ProfileRequest]] = {"scale": ScaleRequest, "profile": ProfileRequest}


def new_id() -> str:
    """An id for a request."""
    return uuid.uuid4().hex


def as_object(request: Request) -> dict[str, Any]:
    """Returns a request as the object that its file contains."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(request, kind))
    return {"kind": kind, **asdict(request)}


def parse_request(value: Mapping[str, Any]) -> Request | None:
    """Reads `as_object`; None if it is malformed."""
    kind = _KINDS.get(str(value.get("kind")))
    return kind.read(value) if kind else None


@contextmanager
def post_request(run: Path, request: Request) -> Iterator[Path]:
    """Puts a request into a run's directory until it is taken or the context is left; yields its file."""
    path = run / _FILES.replace("*", request.request)
    writing = path.with_suffix(".writing")
    try:
        writing.write_text(json.dumps(as_object(request)), encoding="utf-8")
        writing.rename(path)
        yield path
    finally:
        writing.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def take_requests(run: Path) -> Iterator[Request]:
    """Takes the requests out of a run's directory."""
    for path in sorted(run.glob(_FILES)):
        with suppress(OSError, ValueError):  # its writer has removed it
            value = read_object(path)
            path.unlink()
            if request := parse_request(value):
                yield request


class Contact(Protocol):
    """How another process than its parent reaches the launcher of a run."""

    @property
    def events(self) -> Path:
        """The file with the launcher's events."""

    @property
    def period(self) -> float:
        """Seconds between two calls of `look`."""

    def post(self, request: Request) -> AbstractContextManager[object]:
        """Makes a request, which is taken back when the context is left."""

    def look(self, *, unanswered: bool = False) -> bool:
        """Brings the events up to date, and returns whether the launcher is alive.

        Args:
            unanswered: whether a request waits for its answer.
        """


class LocalContact:
    """The launcher of a run in a directory of this machine.

    Args:
        view: the run.
    """

    period = 0.1

    def __init__(self, view: RunView) -> None:
        self._view = view
        self.events = view.path / EVENTS_FILE

    def post(self, request: Request) -> AbstractContextManager[object]:
        """Writes the request into the directory."""
        return post_request(self._view.path, request)

    def look(self, *, unanswered: bool = False) -> bool:
        """Signals the launcher again while a request is unanswered: one that has just started may miss a signal."""
        alive = launcher_of(self._view.path) == self._view.launcher
        if alive and unanswered:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self._view.launcher).send_signal(SIGNAL)
        return alive


class Answers:
    """The events about a request, read from `events.jsonl`.

    Args:
        contact: reaches the launcher.
        view: the run.
        request: the request's id.
        what: what the run is to become, for messages, such as `scaled`.
        deadline: end of the wait, by the monotonic clock.
    """

    def __init__(self, contact: Contact, view: RunView, request: str, what: str, deadline: float) -> None:
        self._contact = contact
        self._view = view
        self._request = request
        self._what = what
        self._deadline = deadline
        self._path = contact.events
        self._read = self._path.stat().st_size if self._path.exists() else 0
        self._events: deque[dict[str, Any]] = deque()
        """Events that were read and not looked at: the answer and its result may be written at once."""

    def first(self, kind: str) -> Mapping[str, Any] | None:
        """Waits for the launcher's answer; see `next`."""
        return self._wait((kind,), "", unanswered=True)

    def next(self, *kinds: str, task: str = "") -> Mapping[str, Any] | None:
        """Waits for an event about the request, and returns it; None at the deadline.

        Args:
            kinds: the events that are waited for.
            task: returns the exit of this task, too, which is an event `exited`.

        Raises:
            TfdistError: the run ended first.
        """
        return self._wait(kinds, task, unanswered=False)

    def _wait(self, kinds: tuple[str, ...], task: str, *, unanswered: bool) -> Mapping[str, Any] | None:
        while True:
            alive = self._contact.look(unanswered=unanswered)
            self._events.extend(self._new())
            while self._events:
                event = self._events.popleft()
                if event.get("event") in kinds and event.get("request") == self._request:
                    return event
                if task and event.get("event") == "exited" and event.get("task") == task:
                    return event
                if event.get("event") == "phase" and event.get("phase") == "ended":
                    alive = False
            if not alive:
                raise TfdistError(
                    f"{self._view.path.name} ended before it was {self._what}",
                    code="run-ended",
                    hint=f"tfdist status {self._view.shown} shows why",
                )
            if time.monotonic() >= self._deadline:
                return None
            time.sleep(self._contact.period)

    def _new(self) -> Iterator[dict[str, Any]]:
        """Yields the new events, complete lines only."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return  # no event yet
        with file:
            file.seek(self._read)
            text, line_feed, _ = file.read().rpartition(b"\n")
        self._read += len(text + line_feed)
        yield from parse_lines(text.split(b"\n"))
