"""Checkpoints on disk: one folder each, written under a temporary name, then renamed, and verified when read.

    CHECKPOINTS/step-00001200/variables.index, variables.data-*    TensorFlow's checkpoint format, 64 MiB in a file
                              delta-1.index, delta-1.data-*         rows of dynamic tables that changed afterwards
                              callbacks.npz                         arrays of callbacks, if there are any
                              state.json                            everything else, and each file's size and SHA-256
    CHECKPOINTS/damaged-step-00001000                               a damaged checkpoint, set aside
    CHECKPOINTS/evaluator.json                                      which checkpoints an evaluator has evaluated

A delta checkpoint refers to the files of the one before it, by hard links or copies, so that each folder is complete.

A folder gets its final name by one rename, after all its files are on the disk. A folder without that name is not a
checkpoint. Only the training changes the folder; an evaluator and an export read it, and write only `evaluator.json`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.run_files import read_bytes
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.train.checkpoint.durable_files import digest_of, remove, sync, write_synced
from tfdist_cli.train.checkpoint.files.deltas import delta_prefix, read_variables, refer, write_changes
from tfdist_cli.train.checkpoint.files.resized_tables import rows_of_resized, shapes_before
from tfdist_cli.train.checkpoint.files.retention import EVALUATED_FILE, parse_evaluated, steps_to_remove, undamaged
from tfdist_cli.train.checkpoint.files.state import (
    ARRAYS_FILE,
    DELTA_FORMAT,
    STATE_FILE,
    DamagedCheckpoint,
    StoredCheckpoint,
    TrainingState,
    read_errors_as_damage,
    read_state,
    sealed,
    verify,
)
from tfdist_cli.train.checkpoint.tensors import (
    VARIABLES,
    ReadPiece,
    named_variables,
    names_in,
    read_live,
    write_variables,
)
from tfdist_cli.train.checkpoint.uploads import Report
from tfdist_cli.train.layers.changed_rows import ChangedRows
from tfdist_cli.train.layers.dynamic_tables import forget_changes
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import innermost

PREFIX = "step-"
WRITING = ".writing-"
REPLACED = ".replaced-"
PUSHING = ".pushing-"
_REMOVING = ".removing-"
_DAMAGED = "damaged-"
_STEP = re.compile(r"[0-9]{8,18}")
_OF_VARIABLES = ("optimizer", "shapes", "files", "format", "deltas", "full_step")
"""The parts of a `TrainingState` that describe the variables' files."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointFolder:
    """The checkpoints of one training.

    Args:
        path: the folder, created when the training begins.
        keep: how many of the newest checkpoints to keep.
    """

    poll_seconds = 0.3
    """How often an evaluator looks for new checkpoints: a network file system does not notify of changes."""

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path
        self._keep = keep
        self._latest: TrainingState | None = None
        self._base: StoredCheckpoint | None = None
        self._is_created = False

    @property
    def location(self) -> Location:
        """Where the checkpoints are stored."""
        return self.path

    def prepare(self) -> None:
        """Prepares the folder for a training. Completes or removes what a killed training left.

        Raises:
            TrainingError: the folder is not writable.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._is_created = True
            self._restore_replaced()
            for pattern in (f"{WRITING}*", f"{_REMOVING}*", f"{PUSHING}*", f"{PREFIX}*/.{STATE_FILE}.*"):
                for rest in self.path.glob(pattern):
                    remove(rest)
            probe = self.path / f"{WRITING}probe"
            probe.mkdir()
            write_synced(probe / STATE_FILE, {})
            remove(probe)
            sync(self.path)
            sync(self.path.parent)
        except OSError as error:
            if error.errno in _DISK_FULL:
                return  # the user may free space in time, and each save that fails is reported
            raise TrainingError(
                f"the checkpoint folder {self.path} is not writable: {error}",
                code="checkpoint-dir-not-writable",
                hint="set another checkpoint.dir, or give this user write permission",
            ) from error

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged ones too, oldest first."""
        if not self.path.is_dir():
            return []
        steps = {step_of(entry.name.removeprefix(REPLACED)) for entry in self.path.iterdir()}
        return sorted(step for step in steps if step is not None)

    def peek(self, step: int) -> StoredCheckpoint:
        """Returns the checkpoint of a step after comparing the sizes of its files, without reading all of them.

        Raises:
            DamagedCheckpoint: it is missing or damaged.
        """
        return self._peek_here(step)

    def _peek_here(self, step: int) -> StoredCheckpoint:
        folder = self._folder(step)
        if not folder.exists() and (replaced := self.path / f"{REPLACED}{folder.name}").exists():
            folder = replaced  # its replacement does not have its final name yet
        state = read_state(folder / STATE_FILE)
        for name, (size, _) in state.files.items():
            with read_errors_as_damage(folder / name):
                actual = (folder / name).stat().st_size
            if actual != size:
                raise DamagedCheckpoint(f"{folder / name} has {actual} bytes instead of {size}")
        return StoredCheckpoint(folder, state)

    def find(self, step: int) -> StoredCheckpoint:
        """Returns the checkpoint of a step after comparing the SHA-256 of each of its files.

        Raises:
            DamagedCheckpoint: it is missing or damaged.
        """
        checkpoint = self._peek_here(step)
        verify(checkpoint)
        return checkpoint

    def newest(self) -> tuple[StoredCheckpoint | None, dict[int, str]]:
        """Returns the newest undamaged checkpoint or None, and the damage of newer checkpoints by their steps."""
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                return self.find(step), damaged
            except DamagedCheckpoint as reason:
                damaged[step] = str(reason)
        return None, damaged

    def set_aside(self, step: int) -> Location:
        """Renames a damaged checkpoint, so that the user can examine it. Returns where it is now.

        Raises:
            OSError: it cannot be renamed.
        """
        folder = self._folder(step)
        new = next(path for name in damaged_names(folder.name) if not (path := self.path / name).exists())
        folder.rename(new)
        return new

    def next_is_delta(self, full_every: int) -> bool:
        """Whether the next checkpoint may be a delta of the last one, which was saved here or restored from here.

        Args:
            full_every: each so many-th checkpoint is full.
        """
        return self._base is not None and self._base.state.deltas + 1 < full_every

    def only_state_changes(self, state: TrainingState, arrays: Sequence[np.ndarray], *, changed: bool) -> bool:
        """Whether `save` would rewrite nothing but state.json of the last checkpoint. For the arguments see there."""
        return not (changed or arrays) and self._latest is not None and self._latest.step == state.step

    def save(
        self,
        step: ModelStep,
        state: TrainingState,
        *,
        arrays: Sequence[np.ndarray] = (),
        read: ReadPiece = read_live,
        changed: bool = True,
        rows: Sequence[ChangedRows] | None = None,
    ) -> Path:
        """Writes a checkpoint and removes old ones. Returns the checkpoint's folder.

        Args:
            step: the model.
            state: the state of the training.
            arrays: the arrays of callbacks.
            read: returns the value of a piece of a variable.
            changed: whether variables may have changed since a checkpoint of the same step was saved here.
            rows: for a delta, if `next_is_delta`, what has changed in each dynamic table; None for a full checkpoint.

        Raises:
            OSError: the disk is full, or the folder cannot be written; earlier checkpoints are untouched.
        """
        folder = self._folder(state.step)
        self._wait_to_replace(state.step)
        if not self._is_created:  # the disk was full when the training began
            self.path.mkdir(parents=True, exist_ok=True)
        if self.only_state_changes(state, arrays, changed=changed):
            return self._rewrite_state(folder, state)
        base, self._base = self._base, None  # if this fails, the rows that had changed are in no checkpoint
        writing = self.path / f"{WRITING}{state.step:08d}-{os.getpid()}"
        remove(writing)
        try:
            writing.mkdir()  # without parents: a checkpoint folder that was removed is not created again
            deltas = base.state.deltas + 1 if base and rows is not None else 0
            if rows is not None and deltas:
                write_changes(step, delta_prefix(writing, deltas), read, rows)
            else:
                write_variables(step, writing / VARIABLES, read)
            if arrays:
                np.savez(writing / ARRAYS_FILE, *arrays)
            files = {entry.name: [entry.stat().st_size, digest_of(entry)] for entry in sorted(writing.iterdir())}
            for name in files:
                sync(writing / name)
            state = replace(state, optimizer=_optimizer_name(step), shapes=_shapes(step), files=files)
            if base and deltas:
                state = refer(writing, base, replace(state, deltas=deltas, format=DELTA_FORMAT))
            write_synced(writing / STATE_FILE, sealed(state))
            sync(writing)
            self._make_visible(writing, folder)
        except BaseException:
            remove(writing)
            raise
        self._latest, self._base = state, StoredCheckpoint(folder, state)
        self._prune(state.step)
        return folder

    def restore(self, checkpoint: StoredCheckpoint, step: ModelStep, *, optimizer: bool = True) -> None:
        """Reads a checkpoint into the model's variables.

        Args:
            checkpoint: the checkpoint.
            step: the model, built.
            optimizer: whether to restore the optimizer too; an evaluator needs only the model.

        Raises:
            TrainingError: it is a checkpoint of another model or optimizer.
        """
        state = checkpoint.state
        resized = rows_of_resized(step, state.shapes)
        shapes = shapes_before(step, resized)
        count = None if optimizer else len(step.parameters) + len(step.saved_state)
        if difference := _difference(state.shapes[:count], shapes[:count]) or _moved(checkpoint, step):
            raise TrainingError(
                f"{checkpoint.location} is a checkpoint of another model: {difference}",
                code="checkpoint-of-another-model",
                hint="set another checkpoint.dir, or train with the model and optimizer that the checkpoint is of",
            )
        if optimizer and state.optimizer != _optimizer_name(step):
            raise TrainingError(
                f"{checkpoint.location} was saved with the optimizer {state.optimizer}, not {_optimizer_name(step)}",
                code="checkpoint-of-another-optimizer",
                hint="set another checkpoint.dir, or train with the optimizer that the checkpoint is of",
            )
        read_variables(step, checkpoint.path, optimizer=optimizer, deltas=state.deltas, resized=resized)
        if optimizer:
            forget_changes(step.model)
            self._base = None if checkpoint.url or resized else checkpoint

    def publish(self, step: int, report: Report) -> None:
        """Makes a saved checkpoint available to other machines; here it already is.

        Args:
            step: the step of the checkpoint.
            report: is called once with the result, perhaps later, in another thread.
        """
        report(self._folder(step))

    def flush(self) -> None:
        """Waits until all checkpoints are published, or have failed to be."""

    def close(self, seconds: float) -> None:
        """Waits for checkpoints that are being published for a limited time, after the training has failed."""

    def unsaved_hint(self) -> str:
        """What to do about a last checkpoint that could not be written."""
        return (
            f"free space in {self.path}, or make it writable, and launch again: training resumes from the last good "
            "checkpoint"
        )

    def mark_evaluated(self, steps: list[int], scores: Mapping[str, Any] | None = None) -> None:
        """Writes which checkpoints the evaluator has evaluated, and `CheckpointScores.packed`."""
        if not steps:
            self.path.mkdir(parents=True, exist_ok=True)
            for rest in self.path.glob(f".{EVALUATED_FILE}.*"):  # of an evaluator that was killed
                remove(rest)
        write_synced(self.path / EVALUATED_FILE, {"scored": steps, **(scores or {})})

    def evaluated(self) -> bytes:
        """Returns the content of evaluator.json; empty if there is none, or it cannot be read."""
        with contextlib.suppress(OSError):
            return read_bytes(self.path / EVALUATED_FILE)
        return b""

    def _wait_to_replace(self, step: int) -> None:
        """Waits until the checkpoint of a step may be replaced."""

    def _folder(self, step: int) -> Path:
        return self.path / f"{PREFIX}{step:08d}"

    def _make_visible(self, writing: Path, folder: Path) -> None:
        """Renames a complete checkpoint to its final name. `peek` finds the one that it replaces until then."""
        replaced = self.path / f"{REPLACED}{folder.name}"
        if folder.exists():
            remove(replaced)
            folder.rename(replaced)
        try:
            writing.rename(folder)
        except OSError:
            self._restore_replaced()
            raise
        sync(self.path)
        remove(replaced)

    def _restore_replaced(self) -> None:
        """Completes or undoes a `_make_visible` that was interrupted."""
        for replaced in self.path.glob(f"{REPLACED}*"):
            folder = self.path / replaced.name[len(REPLACED) :]
            if folder.exists():
                remove(replaced)
            else:
                replaced.rename(folder)

    def _rewrite_state(self, folder: Path, state: TrainingState) -> Path:
        """Rewrites state.json of a checkpoint whose variables have not changed."""
        if latest := self._latest:
            same = {key: getattr(latest, key) for key in _OF_VARIABLES}
            state = replace(state, **same)
            if state != latest:
                write_synced(folder / STATE_FILE, sealed(state))
                self._latest = state
                self._base = self._base and replace(self._base, state=state)
        return folder

    def _prune(self, newest: int) -> None:
        """Removes old checkpoints after a new one is complete. Damaged ones are neither counted nor removed."""
        shared = undamaged(self.peek, [step for step in self.steps() if step <= newest])
        evaluated = None
        with contextlib.suppress(OSError):  # there is no evaluator
            evaluated = parse_evaluated(read_bytes(self.path / EVALUATED_FILE))
        for old in steps_to_remove(shared, self._keep, evaluated):
            self._discard(self._folder(old))

    def _discard(self, folder: Path) -> None:
        """Removes a checkpoint. It is renamed first, so that an incomplete one is never found under its final name."""
        removing = self.path / f"{_REMOVING}{folder.name}"
        remove(removing)
        with contextlib.suppress(OSError):  # then it stays
            folder.rename(removing)
            remove(removing)


def _optimizer_name(step: ModelStep) -> str:
    return " and ".join(type(innermost(optimizer)).__name__ for optimizer in step.optimizers)


def step_of(folder: str) -> int | None:
    """Returns the step of a checkpoint's folder; None if it is another folder."""
    number = folder.removeprefix(PREFIX)
    return int(number) if folder != number and _STEP.fullmatch(number) else None


def damaged_names(folder: str) -> Iterator[str]:
    """Yields the names to set a damaged checkpoint aside under."""
    yield f"{_DAMAGED}{folder}"
    yield from (f"{_DAMAGED}{folder}-{number}" for number in range(2, 1000))


def _shapes(step: ModelStep) -> list[list[Any]]:
    return shapes_before(step, {})


def _difference(saved: list[list[Any]], wanted: list[list[Any]]) -> str:
    """Returns the first difference between the types and shapes of variables; empty if there is none."""
    for (path, dtype, shape), (own, own_dtype, own_shape) in zip(saved, wanted, strict=False):
        if (dtype, tuple(shape)) != (own_dtype, tuple(own_shape)):
            return f"its {path} is {dtype} {tuple(shape)}, the model's {own} is {own_dtype} {tuple(own_shape)}"
    if len(saved) != len(wanted):
        return f"it has {len(saved)} variables, and the model and its optimizer have {len(wanted)}"
    return ""


def _moved(checkpoint: StoredCheckpoint, step: ModelStep) -> str:
    """Returns which variable has another place in the checkpoint, since other ones are trained; empty if none has.

    Layers without names of their own have other paths each time that a process builds the model. So the paths of all
    variables are those of the checkpoint, or none are compared.
    """
    named = list(named_variables(step, optimizer=False))
    own = [variable.path for _, variable in named]
    saved = [path for path, *_ in checkpoint.state.shapes[: len(own)]]
    if sorted(saved) == sorted(own):
        for path, other in zip(saved, own, strict=True):
            if path != other:
                return f"its {path} has the place of the model's {other}"
    names = names_in(checkpoint.path / VARIABLES)
    moved = [variable.path for name, variable in named if name not in names]
    return f"the model's {moved[0]} is trained in one of them only" if moved else ""
