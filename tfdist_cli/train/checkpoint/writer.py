"""Writing checkpoints while training continues."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.train.checkpoint.files.state import STATE_FILE, StoredCheckpoint, TrainingState, parse_state
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.tables.push import TablePush
from tfdist_cli.train.checkpoint.tensors import Snapshot, largest_task_bytes, read_live
from tfdist_cli.train.layers.changed_rows import ChangedRows
from tfdist_cli.train.layers.dynamic_tables import forget_changes, row_indices
from tfdist_cli.train.model.train_step import ModelStep

SNAPSHOT_BYTES = 2**30
"""With `auto`, the most bytes of variables of a task for which a snapshot is made: it may take as much memory again."""
CLOSE_SECONDS = 30.0
"""Seconds that a failed training waits for the checkpoint that is being written."""

log = logging.getLogger("tfdist")

Asynchronous = Literal["auto"] | bool


@dataclass(frozen=True)
class CheckpointContent:
    """The content of a checkpoint beside variables.

    Args:
        state: the state, as JSON.
        arrays: the arrays in it.
        changed: whether variables may have changed since a checkpoint of the same step was saved.
    """

    state: TrainingState
    arrays: Sequence[np.ndarray] = ()
    changed: bool = True


class CheckpointWriter:
    """Writes checkpoints, one at a time, in a background thread or in the calling one.

    Args:
        folder: the folder of the checkpoints.
        step: the model, built.
        asynchronous: whether training continues meanwhile; `auto`: if a snapshot takes no more than `SNAPSHOT_BYTES`.
        full_every: each so many-th checkpoint is full. The others hold what has changed in dynamic tables since the
            checkpoint before.
        push: pushes the rows of dynamic tables after each checkpoint; None for no pushes.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        step: ModelStep,
        asynchronous: Asynchronous = "auto",
        full_every: int = 1,
        push: TablePush | None = None,
    ) -> None:
        self._folder = folder
        self._step = step
        self._asynchronous = asynchronous
        self._full_every = full_every
        self._push = push
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.unsaved: Exception | None = None
        """The error that kept the last checkpoint from being written; None if it was written."""

    def save(self, content: CheckpointContent, *, wait: bool) -> None:
        """Saves a checkpoint after the previous one is written. No step is running.

        A full or failing disk is reported and noted in `unsaved`; training continues, and the last good checkpoint
        stays.

        Args:
            content: the content beside variables.
            wait: whether to return only after the checkpoint is written.

        Raises:
            tf.errors.OpError: a task that holds variables has failed.
        """
        begun = time.monotonic()
        self.finish()
        rows = self._changed_rows(content)
        if wait or not self._is_asynchronous(rows):
            self._write(partial(self._folder.save, read=read_live, rows=rows), content, begun)
            if wait:
                self._folder.flush()
                if self._push:
                    self._push.wait()
            return
        snapshot = Snapshot(self._step, rows)
        content = CheckpointContent(content.state, [array.copy() for array in content.arrays], content.changed)
        paused = time.monotonic() - begun
        write = partial(self._folder.save, read=snapshot.read, rows=rows)
        self._thread = threading.Thread(
            target=self._write_in_background, args=(write, content, begun, paused), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            tf.errors.OpError: a task that holds variables has failed.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the checkpoint that is being written, for a limited time, after the training has failed."""
        begun = time.monotonic()
        if self._thread:
            self._thread.join(CLOSE_SECONDS)
        self._folder.close(max(0.0, begun + CLOSE_SECONDS - time.monotonic()))
        if self._push:
            self._push.wait(max(0.0, begun + CLOSE_SECONDS - time.monotonic()))

    @property
    def not_pushed(self) -> Exception | None:
        """The error that kept the rows of the last checkpoint from being pushed; None if they were, or need not be."""
        return self._push.failed if self._push else None

    def _changed_rows(self, content: CheckpointContent) -> list[ChangedRows] | None:
        """Returns what has changed in dynamic tables, for a delta; None for a full checkpoint, or one of no rows."""
        indices = [index for index in row_indices(self._step.model) if index.tracks_changes]
        if not indices or self._folder.only_state_changes(content.state, content.arrays, changed=content.changed):
            return None
        if self._folder.next_is_delta(self._full_every):
            return [ChangedRows(index) for index in indices]
        forget_changes(self._step.model)  # the full checkpoint has them
        return None

    def _is_asynchronous(self, rows: Sequence[ChangedRows] | None) -> bool:
        if self._asynchronous == "auto":
            return largest_task_bytes(self._step, rows) <= SNAPSHOT_BYTES
        return self._asynchronous

    def _write_in_background(
        self, write: Callable[..., Path], content: CheckpointContent, begun: float, paused: float
    ) -> None:
        try:
            self._write(write, content, begun, paused)
        except Exception as error:  # noqa: BLE001 `finish` raises it in the training's thread
            self._error = error

    def _write(
        self, write: Callable[..., Path], content: CheckpointContent, begun: float, paused: float | None = None
    ) -> None:
        state = content.state
        try:
            folder = write(self._step, state, arrays=content.arrays, changed=content.changed)
            if self._push:
                written = parse_state((folder / STATE_FILE).read_bytes(), str(folder / STATE_FILE))
                self._push.add(StoredCheckpoint(folder, written))
        except OSError as error:
            self._report(state.step, begun, 0.0, error)
            return
        paused = time.monotonic() - begun if paused is None else paused
        self._folder.publish(state.step, partial(self._report, state.step, begun, paused))

    def _report(self, step: int, begun: float, paused: float, result: Path | Url | Exception) -> None:
        """Reports that a checkpoint is complete, or why it is not."""
        if isinstance(result, Exception):
            self.unsaved = result
            log.error("checkpoint of step %d could not be written: %s; training continues", step, result)
            emit("checkpoint_failed", step=step, reason=str(result))
            return
        self.unsaved = None
        took = round(time.monotonic() - begun, 3)
        emit("checkpoint", step=step, path=str(result), took=took, paused=round(paused, 3))
