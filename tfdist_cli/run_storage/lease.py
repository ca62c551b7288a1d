"""Which launcher writes to a run directory in a storage service: one at a time, and it says that it is alive.

    s3://bucket/run/launcher.json       written when a launch begins, every few seconds, and when it has ended

Storage services have no locks. A launcher that stops writing is dead after a while; another one then takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import LEASE_FILE
from tfdist_cli.launch.run.history import LEASE_SECONDS
from tfdist_cli.protocol.run_files import parse_object
from tfdist_cli.storage.remote import RemoteFolder

RENEWAL_SECONDS = LEASE_SECONDS / 4
"""Seconds between two signs of life."""
RUNNING, ENDED, LOST = "running", "ended", "lost"

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Lease:
    """A launch that writes to a run directory in a storage service.

    Args:
        launch: its id.
        host: the launcher's machine.
        pid: its process.
        state: `running`, `ended`, or `lost` if the launcher disappeared.
        time: when this was written.
    """

    launch: str
    host: str
    pid: int
    state: str = RUNNING
    time: str = ""

    @classmethod
    def new(cls) -> Lease:
        """Returns the lease of a launch that begins in this process."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid())

    @classmethod
    def read(cls, remote: RemoteFolder) -> Lease | None:
        """Returns the lease of a run directory; None if it has none, or a damaged one.

        Raises:
            OSError: the service cannot be used.
        """
        try:
            return cls.parse(parse_object(remote.read(LEASE_FILE)))
        except (FileNotFoundError, ValueError):
            return None

    @classmethod
    def parse(cls, value: Any) -> Lease:
        """Reads a lease.

        Raises:
            ValueError: it is damaged.
        """
        try:
            texts = {key: str(value[key]) for key in ("launch", "host", "state", "time")}
            return cls(pid=int(value["pid"]), **texts)
        except (KeyError, TypeError) as error:
            raise ValueError("it is no lease") from error

    def is_taken(self, remote: RemoteFolder) -> bool:
        """Returns whether another launch has taken over.

        Raises:
            OSError: the service cannot be used.
        """
        found = Lease.read(remote)
        return found is not None and found.launch != self.launch

    def written(self, remote: RemoteFolder, state: str | None = None) -> Lease:
        """Writes this lease with the time. Returns what was written.

        Raises:
            OSError: the service cannot be used.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        current = replace(self, state=state or self.state, time=now)
        remote.write(LEASE_FILE, json.dumps(asdict(current)).encode())
        return current


def await_free(remote: RemoteFolder, found: Lease | None, wait: Callable[[float], object] | None = None) -> None:
    """Waits until a launcher that may be alive has given a sign of life, or has not.

    Args:
        remote: the run directory.
        found: its lease.
        wait: waits for some seconds.

    Raises:
        UsageError: the launcher is alive.
        OSError: the service cannot be used.
    """
    left = LEASE_SECONDS if found and found.state == RUNNING else 0.0
    if found and left:
        log.warning(
            "waiting up to %.0f s to see whether the launch of pid %d on %s is dead", left, found.pid, found.host
        )
    while found and left > 0:
        (wait or threading.Event().wait)(RENEWAL_SECONDS)
        left -= RENEWAL_SECONDS
        now = Lease.read(remote)
        if now and now.state != RUNNING:
            return
        if now != found:
            raise UsageError(
                f"another launch runs in {remote.url}: pid {found.pid} on {found.host}",
                code="run-dir-in-use",
                hint="wait for it, or choose another --run-dir",
            )
