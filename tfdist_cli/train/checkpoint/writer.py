"""Writing checkpoints while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.store import CheckpointFolder, TrainingState
from tfdist_cli.train.checkpoint.tensors import Snapshot, largest_share, live
from tfdist_cli.train.model.train_step import ModelStep

SNAPSHOT_BYTES = 2**30
"""With `auto`, what a task keeps of variables at the most for a snapshot: it may need as much memory again."""
LAST_SECONDS = 30.0
"""How long a training that fails waits for the checkpoint that is being written."""

log = logging.getLogger("tfdist")

Asynchronous = Literal["auto"] | bool


@dataclass(frozen=True)
class Content:
    """What a checkpoint is to hold beside variables.

    Args:
        state: what JSON can say.
        arrays: what it cannot.
        changed: whether variables may have changed since a checkpoint of the same step was saved.
    """

    state: TrainingState
    arrays: Sequence[np.ndarray] = ()
    changed: bool = True


class CheckpointWriter:
    """Saves one checkpoint after the other, each in a thread of its own or at once.

    Args:
        folder: where they go.
        step: the model, built.
        asynchronous: whether training goes on meanwhile; `auto`: where a snapshot takes no more than `SNAPSHOT_BYTES`.
    """

    def __init__(self, folder: CheckpointFolder, step: ModelStep, asynchronous: Asynchronous = "auto") -> None:
        self._folder = folder
        self._step = step
        self._wanted = asynchronous
        self._thread: threading.Thread | None = None
        self._broken: Exception | None = None
        self.unsaved: OSError | None = None
        """Why the last checkpoint could not be written; None when it could."""

    def save(self, content: Content, *, wait: bool) -> None:
        """Saves a checkpoint, when the one before it has been written. No step is under way.

        A disk that is full, or that fails, is said and noted: what has been learned is still here, and so is the last
        good checkpoint.

        Args:
            content: what it is to hold beside the variables.
            wait: whether to return only when it has been written.

        Raises:
            tf.errors.OpError: a task that holds variables is gone.
        """
        begun = time.monotonic()
        self.finish()
        if wait or not self._asynchronous():
            self._write(partial(self._folder.save, read=live), content, begun)
            return
        held = Snapshot(self._step)
        content = Content(content.state, [array.copy() for array in content.arrays], content.changed)
        paused = time.monotonic() - begun
        write = partial(self._folder.save, read=held.read)
        self._thread = threading.Thread(
            target=self._write_beside, args=(write, content, begun, paused), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            tf.errors.OpError: a task that holds variables is gone.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._broken:
            broken, self._broken = self._broken, None
            raise broken

    def close(self) -> None:
        """Gives the checkpoint that is being written some time: the training has failed, and cannot write another."""
        if self._thread:
            self._thread.join(LAST_SECONDS)

    def _asynchronous(self) -> bool:
        if self._wanted == "auto":
            return largest_share(self._step) <= SNAPSHOT_BYTES
        return self._wanted

    def _write_beside(self, write: Callable[..., object], content: Content, begun: float, paused: float) -> None:
        try:
            self._write(write, content, begun, paused)
        except Exception as error:  # noqa: BLE001 it is raised in the training's own thread
            self._broken = error

    def _write(self, write: Callable[..., object], content: Content, begun: float, paused: float | None = None) -> None:
        state = content.state
        try:
            path = write(self._step, state, arrays=content.arrays, changed=content.changed)
        except OSError as error:
            self.unsaved = error
            log.error(  # noqa: TRY400 the reason says it all; a traceback of ours would hide it
                "checkpoint of step %d could not be written: %s; training goes on", state.step, error
            )
            emit("checkpoint_failed", step=state.step, reason=str(error))
            return
        self.unsaved = None
        seconds = time.monotonic() - begun
        emit(
            "checkpoint",
            step=state.step,
            path=str(path),
            took=round(seconds, 3),
            paused=round(seconds if paused is None else paused, 3),
        )
