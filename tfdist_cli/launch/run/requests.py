"""Requests to a launcher: files that other processes leave in the run's directory, and tell it of by a signal.

A request is answered in `events.jsonl`, where whoever has made it reads the answer. Once it is read it is removed, and
one that nobody has read is removed by whoever has made it.
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
"""What tells a launcher of a request. A process that does not listen for it (any more) ignores it, and lives on."""
_FILES = "request-*.json"


@dataclass(frozen=True)
class Request:
    """Other numbers of tasks, asked for while a job runs.

    Args:
        number: by which its answer is known.
        replicas: role → how many tasks it is to have.
        dry_run: whether it is only asked if that could be done.
    """

    number: str
    replicas: Mapping[Role, int]
    dry_run: bool = False

    @classmethod
    def read(cls, value: Any) -> Request | None:
        """A request from its file; None for what is none."""
        replicas = value.get("replicas") if isinstance(value, dict) else None
        if not isinstance(replicas, dict) or not all(role in ROLES for role in replicas):
            return None
        if not all((whole(count) or 0) >= 0 and whole(count) is not None for count in replicas.values()):
            return None
        return cls(str(value.get("request")), replicas, bool(value.get("dry_run")))


@contextmanager
def left(run: Path, replicas: Mapping[Role, int], *, dry_run: bool) -> Iterator[Request]:
    """A request in a run's directory, until it is taken or the context is left."""
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


def taken(run: Path) -> Iterator[Request]:
    """Takes the requests out of a run's directory."""
    for path in sorted(run.glob(_FILES)):
        with suppress(OSError, ValueError):  # whoever made it has taken it back
            request = Request.read(read_object(path))
            path.unlink()
            if request:
                yield request
