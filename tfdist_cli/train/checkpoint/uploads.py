"""Uploads in the background: one at a time, and of those that wait only the newest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tfdist_cli.spec.path_scheme import Url

Report = Callable[[Path | Url | Exception], None]
"""Is called with the place of a complete checkpoint, or with the error that kept it from being written."""

log = logging.getLogger("tfdist")


class Uploads:
    """Uploads checkpoints in a thread of its own.

    Args:
        upload: uploads the checkpoint of a step, and returns its address.
    """

    def __init__(self, upload: Callable[[int], Url]) -> None:
        self._upload = upload
        self._waiting: tuple[int, Report] | None = None
        self._changed = threading.Condition()
        self.running: int | None = None
        """The step of the checkpoint that is being uploaded."""

    def add(self, step: int, report: Report) -> None:
        """Uploads a checkpoint after the current one. One that waits already is not uploaded: this one is newer."""
        with self._changed:
            if self._waiting:
                log.info("checkpoint of step %d is not uploaded: that of step %d is newer", self._waiting[0], step)
            self._waiting = step, report
            if self.running is None:
                self.running = step
                threading.Thread(target=self._run, name="checkpoint-upload", daemon=True).start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until everything is uploaded or has failed.

        Args:
            seconds: how long at most; None for as long as it takes.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self.running is not None:
                if not self._changed.wait(None if end is None else max(0.0, end - time.monotonic())):
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self.running = None
                    self._changed.notify_all()
                    return
                (step, report), self._waiting = self._waiting, None
                self.running = step
            try:
                result: Url | Exception = self._upload(step)
            except Exception as error:  # noqa: BLE001 the training is told, and goes on
                result = error
            report(result)
