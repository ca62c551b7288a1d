"""Requests to a launcher: files in the run's directory, which another process writes and announces by a signal.

The launcher answers a request in `events.jsonl`. It removes the file when it reads it; a file that it has not read is
removed by the process that wrote it.
"""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.protocol.run_files import read_object, whole
from tfdist_cli.spec.roles import ROLES, Role

SIGNAL = signal.SIGURG
"""The signal that announces a request. A process without a handler for it ignores it."""
_FILES = "request-*.json"


@dataclass(frozen=True)
class Request:
    """A request for other numbers of tasks while a job runs.

    Args:
        number: the id that its answer refers to.
        replicas: the wanted number of tasks of each role that changes.
        dry_run: whether to answer only, and change nothing.
    """

    number: str
    replicas: Mapping[Role, int]
    dry_run: bool = False

    @classmethod
    def read(cls, value: Any) -> Request | None:
        """Reads a request from its file; None if it is malformed."""
        replicas = value.get("replicas") if isinstance(value, dict) else None
        if not isinstance(replicas, dict) or not all(role in ROLES for role in replicas):
            return None
        if not all((whole(count) or 0) >= 0 and whole(count) is not None for count in replicas.values()):
            return None
        return cls(str(value.get("request")), replicas, bool(value.get("dry_run")))


@contextmanager
def post_request(run: Path, replicas: Mapping[Role, int], *, dry_run: bool) -> Iterator[Request]:
    """Puts a request into a run's directory until it is taken or the context is left."""
    request = Request(uuid.uuid4().hex, replicas, dry_run)
    path = run / _FILES.replace("*", request.number)
    writing = path.with_suffix(".writing")
    text = json.dumps({"request": request.number, "replicas": dict(replicas), "dry_run": dry_run})
    try:
        writing.write_text(text, encoding="utf-8")
        writing.rename(path)
        yield request
    finally:
        writing.unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def take_requests(run: Path) -> Iterator[Request]:
    """Takes the requests out of a run's directory."""
    for path in sorted(run.glob(_FILES)):
        with suppress(OSError, ValueError):  # its writer has removed it
            request = Request.read(read_object(path))
            path.unlink()
            if request:
                yield request
