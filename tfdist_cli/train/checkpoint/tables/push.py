"""Pushes the rows of dynamic tables to a folder after each checkpoint, for servers that follow the training."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.storage.local import Folder, open_folder
from tfdist_cli.tables.layout import (
    DamagedPush,
    Manifest,
    RowsFile,
    digest,
    manifest_name,
    rows_name,
    sequence_of,
    sequences,
)
from tfdist_cli.train.checkpoint.durable_files import link, remove
from tfdist_cli.train.checkpoint.files.state import StoredCheckpoint
from tfdist_cli.train.checkpoint.store import PUSHING
from tfdist_cli.train.checkpoint.tables.rows import StoredRows, parts_of
from tfdist_cli.train.model.train_step import ModelStep

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class _Waiting:
    """A checkpoint to push.

    Args:
        checkpoint: the checkpoint, in a folder of links that nobody removes meanwhile.
        parts: the digests of its parts.
    """

    checkpoint: StoredCheckpoint
    parts: list[str]


class TablePush:
    """Pushes rows in a thread of its own, one checkpoint after the other; of those that wait only the newest.

    A push is a delta if its checkpoint consists of the parts of the one that was pushed last, and of later deltas.
    Otherwise it is a base. So a training that resumes, or whose pushes fail for a time, continues the sequence.

    Args:
        at: the folder, on this machine or in a storage service.
        step: the model, built.

    Raises:
        TrainingError: the folder cannot be read.
    """

    def __init__(self, at: Location, step: ModelStep) -> None:
        self._at = at
        self._folder: Folder = open_folder(at)
        self._rows = StoredRows(step)
        if not self._rows:
            log.warning("push_tables has no effect: the model has no DynamicEmbedding")
        self._waiting: _Waiting | None = None
        self._running = False
        self._changed = threading.Condition()
        self.failed: Exception | None = None
        """Why the last checkpoint was not pushed; None if it was."""
        try:
            self._last, self._taken = self._find_last()
        except OSError as error:
            raise TrainingError(
                f"the pushed tables in {at} cannot be read: {error}",
                code="pushed-tables-unreadable",
                hint="check the address, and that this user or the task's credentials may list, read and write there",
            ) from error

    def add(self, checkpoint: StoredCheckpoint) -> None:
        """Pushes the rows of a checkpoint after those that are being pushed; one that waits already is left out."""
        if not self._rows:
            return
        parts = parts_of(checkpoint.state)
        links = checkpoint.path.with_name(f"{PUSHING}{checkpoint.state.step:08d}-{digest(str(parts).encode())[:8]}")
        with self._changed:
            if self._waiting and self._waiting.checkpoint.path != links:
                remove(self._waiting.checkpoint.path)
                self._waiting = None
            try:
                if not links.exists():
                    links.mkdir()
                    for name in checkpoint.state.files:
                        link(checkpoint.path / name, links / name)
            except OSError as error:  # a full disk without hard links
                remove(links)
                self._fail(checkpoint.state.step, error)
                return
            self._waiting = _Waiting(StoredCheckpoint(links, checkpoint.state), parts)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="table-push", daemon=True).start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until everything is pushed, or has failed to be.

        Args:
            seconds: how long at most; None for as long as it takes.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._running and (end is None or end > time.monotonic()):
                self._changed.wait(None if end is None else end - time.monotonic())

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._running = False
                    self._changed.notify_all()
                    return
                each, self._waiting = self._waiting, None
            try:
                self._push(each)
                self.failed = None
            except Exception as error:  # noqa: BLE001 the training goes on, and the next push has these rows, too
                self._fail(each.checkpoint.state.step, error)
            self._remove_links(each)

    def _remove_links(self, pushed: _Waiting) -> None:
        with self._changed:
            if self._waiting is None or self._waiting.checkpoint.path != pushed.checkpoint.path:
                remove(pushed.checkpoint.path)

    def _fail(self, step: int, error: Exception) -> None:
        self.failed = error
        log.error("the tables of step %d could not be pushed to %s: %s", step, self._at, error)
        emit("tables_not_pushed", step=step, reason=str(error))

    def _find_last(self) -> tuple[Manifest | None, int]:
        """Returns the last push that is not damaged, and the highest number that is taken."""
        names = self._folder.sizes()
        taken = max(sequences(names), default=0)
        if taken:
            with suppress(DamagedPush):
                return Manifest.parsed(self._folder.read(manifest_name(taken)), f"{self._at}/{taken}"), taken
        return None, taken

    def _push(self, each: _Waiting) -> None:
        state, last = each.checkpoint.state, self._last
        if last and last.checkpoint == each.parts and last.tables == self._rows.shapes:
            return  # nothing but the state of the training has changed
        follows = last is not None and last.tables == self._rows.shapes and _begins(each.parts, last.checkpoint)
        sequence, seal = self._taken + 1, last.seal if last else ""
        first, base = (len(last.checkpoint), last.base) if last and follows else (0, sequence)
        files = self._write_rows(each.checkpoint, sequence, first)
        manifest = Manifest(sequence, base, state.step, self._rows.shapes, files, each.parts, seal).sealed()
        self._folder.write(manifest_name(sequence), manifest.packed())
        self._last, self._taken = manifest, sequence
        size, rows = sum(file.bytes for file in files), sum(file.rows for file in files)
        emit("tables_pushed", step=state.step, sequence=sequence, base=base, rows=rows, bytes=size)
        if not follows:
            self._remove_old(last.base if last else sequence)

    def _write_rows(self, checkpoint: StoredCheckpoint, sequence: int, first: int) -> list[RowsFile]:
        files: list[RowsFile] = []
        with tempfile.TemporaryDirectory(prefix="tfdist-push-") as scratch:
            for table, rows in self._rows.pieces(checkpoint.path, first, checkpoint.state.deltas):
                name = rows_name(sequence, len(files))
                content = rows.packed()
                file = Path(scratch) / name
                file.write_bytes(content)
                self._folder.upload(file, name)
                file.unlink()
                files.append(RowsFile(name, table, len(rows.rows), len(content), digest(content)))
        return files

    def _remove_old(self, kept: int) -> None:
        """Removes the pushes before the base that was replaced: a server may still be reading that one."""
        names = self._folder.sizes()
        old = [name for name in names if (number := sequence_of(name)) is not None and number < kept]
        self._folder.delete(sorted(old, key=lambda name: (not name.endswith(".json"), name)))


def _begins(parts: list[str], before: list[str]) -> bool:
    return bool(before) and parts[: len(before)] == before
