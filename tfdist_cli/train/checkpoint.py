"""Checkpoints: a folder for each, written to the side, made visible whole, checked when read.

    CHECKPOINTS/step-00001200/variables.index, variables.data-*    TensorFlow's own format, 64 MiB in a file
                              state.json                            step, epoch, each file's size and SHA-256
    CHECKPOINTS/evaluator.json                                      what an evaluator has scored, if there is one

A folder gets its name, by one rename, after all that is in it has reached the disk. What has no name yet is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.op_error import shortened
from tfdist_cli.train.shards import Block, Whole, pieces
from tfdist_cli.train.step import ModelStep
from tfdist_cli.train.update import innermost

STATE_FILE = "state.json"
SCORED_FILE = "evaluator.json"
FILE_BYTES = 64 * 2**20
"""What one data file holds of variables, and the chief while it writes or reads it; a larger variable that is not
spread has one for itself."""
UNSCORED_KEPT = 16
"""Checkpoints kept beyond `keep` for an evaluator that has not come to them yet."""
_PREFIX = "step-"
_WRITING = ".writing-"
_REPLACED = ".replaced-"
_FORMAT = 1


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds beside variables.

    Args:
        step: global steps done.
        epoch: epochs done.
        final: whether the training was over.
        optimizer: the optimizer's class; others have variables of the same shapes that mean something else.
        shapes: `[path, dtype, shape]` of each variable, in the order they are saved in.
        files: `{name: [bytes, SHA-256]}`.
    """

    step: int
    epoch: int
    final: bool = False
    optimizer: str = ""
    shapes: list[list[Any]] = field(default_factory=list)
    files: dict[str, list[Any]] = field(default_factory=dict)
    format: int = _FORMAT


@dataclass(frozen=True)
class Found:
    """A whole checkpoint on disk."""

    path: Path
    state: TrainingState


class Damaged(Exception):
    """A checkpoint folder that is not whole."""


class CheckpointFolder:
    """The checkpoints of one training.

    Args:
        path: the folder; made when the first one is saved.
        keep: how many of the newest stay.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path
        self._keep = keep
        self._latest: TrainingState | None = None

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first, whole or damaged."""
        if not self.path.is_dir():
            return []
        names = [entry.name[len(_PREFIX) :] for entry in self.path.iterdir() if entry.name.startswith(_PREFIX)]
        return sorted(int(name) for name in names if name.isdigit())

    def find(self, step: int) -> Found:
        """The checkpoint of a step, checked byte for byte.

        Raises:
            Damaged: it is missing or not whole, and why.
        """
        folder = self.path / f"{_PREFIX}{step:08d}"
        state = _read_state(folder / STATE_FILE)
        for name, (size, digest) in state.files.items():
            try:
                found = (folder / name).stat().st_size
                if found != size:
                    raise Damaged(f"{folder / name} has {found} bytes instead of {size}")
                if _digest(folder / name) != digest:
                    raise Damaged(f"{folder / name} has been changed since it was written")
            except OSError as error:
                raise Damaged(f"{folder / name} cannot be read: {error}") from error
        return Found(folder, state)

    def newest(self) -> tuple[Found | None, list[str]]:
        """The newest whole checkpoint, None when there is none, and what is wrong with newer ones."""
        self._put_back()
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.find(step), damaged
            except Damaged as reason:
                damaged.append(str(reason))
        return None, damaged

    def save(self, step: ModelStep, state: TrainingState, *, changed: bool = True) -> Path:
        """Writes a checkpoint and removes those that are no longer kept.

        Args:
            step: the model.
            state: what else there is to know.
            changed: whether variables may have changed since a checkpoint of the same step was saved here.

        Raises:
            OSError: the disk is full, or the folder cannot be written; earlier checkpoints are untouched.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        folder = self.path / f"{_PREFIX}{state.step:08d}"
        if not changed and self._latest and self._latest.step == state.step:
            return self._say_final(folder, state)
        writing = self.path / f"{_WRITING}{state.step:08d}-{os.getpid()}"
        try:
            writing.mkdir()
            _write_variables(step, writing / "variables")
            files = {entry.name: [entry.stat().st_size, _digest(entry)] for entry in sorted(writing.iterdir())}
            state = replace(state, optimizer=_optimizer_name(step), shapes=_shapes(step), files=files)
            _write_synced(writing / STATE_FILE, _sealed(state))
            for name in files:
                _sync(writing / name)
            _sync(writing)
            self._make_visible(writing, folder)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        self._latest = state
        self._prune(state.step)
        return folder

    def restore(self, found: Found, step: ModelStep, *, optimizer: bool = True) -> None:
        """Reads a checkpoint into the model's variables.

        Args:
            found: the checkpoint.
            step: the model, built.
            optimizer: whether its optimizer goes on from there too; an evaluator needs only the model.

        Raises:
            TrainingError: it is a checkpoint of another model.
        """
        saved = [(dtype, tuple(shape)) for _, dtype, shape in found.state.shapes]
        wanted = [(dtype, tuple(shape)) for _, dtype, shape in _shapes(step)]
        count = len(step.parameters) + len(step.state)
        if (saved if optimizer else saved[:count]) != (wanted if optimizer else wanted[:count]):
            raise TrainingError(
                f"{found.path} is a checkpoint of another model: {_difference(found.state.shapes, _shapes(step))}",
                hint="name another checkpoint.dir, or train with the model and optimizer it was saved from",
            )
        if optimizer and found.state.optimizer != _optimizer_name(step):
            raise TrainingError(
                f"{found.path} was saved with the optimizer {found.state.optimizer}, not {_optimizer_name(step)}",
                hint="name another checkpoint.dir, or train with the optimizer it was saved from",
            )
        _read_variables(step, found.path / "variables", optimizer=optimizer)

    def mark_scored(self, steps: list[int]) -> None:
        """Notes which checkpoints the evaluator has scored."""
        _write_synced(self.path / SCORED_FILE, {"scored": steps})

    def _make_visible(self, writing: Path, folder: Path) -> None:
        """Gives a whole checkpoint its name; one that had it stays until then, and `newest` would find it."""
        replaced = self.path / f"{_REPLACED}{folder.name}"
        if folder.exists():
            folder.rename(replaced)
        writing.rename(folder)
        _sync(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _put_back(self) -> None:
        """Finishes what a process that was killed in `_make_visible` had begun."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            folder = self.path / replaced.name[len(_REPLACED) :]
            if folder.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(folder)

    def _say_final(self, folder: Path, state: TrainingState) -> Path:
        """The variables are saved already: only whether the training is over may have changed."""
        if self._latest and state.final and not self._latest.final:
            self._latest = replace(self._latest, final=True)
            _write_synced(folder / STATE_FILE, _sealed(self._latest))
        return folder

    def _prune(self, newest: int) -> None:
        """Removes what is no longer kept. Damaged ones of later steps, which the training did not go on from, stay."""
        steps = [step for step in self.steps() if step <= newest]
        waiting: set[int] = set()
        with contextlib.suppress(FileNotFoundError, ValueError):  # no evaluator, or one that is writing just now
            scored = json.loads((self.path / SCORED_FILE).read_text(encoding="utf-8"))["scored"]
            waiting = set(steps[-(self._keep + UNSCORED_KEPT) :]) - set(scored)
        for old in steps[: -self._keep]:
            if old not in waiting:
                shutil.rmtree(self.path / f"{_PREFIX}{old:08d}", ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for entry in self.path.glob(f"{_WRITING}*"):
            shutil.rmtree(entry, ignore_errors=True)


@dataclass(frozen=True)
class _Entry:
    """What is written or read at once.

    Args:
        name: the variable's name in the files, that which `tf.train.Checkpoint` would give it.
        rows: which part of it, in TensorFlow's form: `10 4 0,3:-` for the first 3 rows of a 10 × 4 variable; empty for
            all of it.
        piece: where it is.
    """

    name: str
    rows: str
    piece: Block | Whole


def _batches(step: ModelStep, *, optimizer: bool = True) -> Iterator[list[_Entry]]:
    """All that is saved, a few pieces at a time, of no more than `FILE_BYTES` if they are several."""
    groups = {"parameters": step.parameters, "state": step.state}
    if optimizer:
        groups["optimizer"] = list(step.model.optimizer.variables)
    batch: list[_Entry] = []
    size = 0
    for group, variables in groups.items():
        for number, variable in enumerate(variables):
            for piece in pieces(variable):
                if batch and size + piece.bytes > FILE_BYTES:
                    yield batch
                    batch, size = [], 0
                name = f"{group}/{number}/.ATTRIBUTES/VARIABLE_VALUE"
                batch.append(_Entry(name, _rows(variable, piece), piece))
                size += piece.bytes
    yield batch


def _rows(variable: keras.Variable, piece: Block | Whole) -> str:
    if isinstance(piece, Whole):
        return ""
    rest = ":-" * (len(variable.shape) - 1)
    return f"{' '.join(str(size) for size in variable.shape)} {piece.first},{piece.count}{rest}"


def _write_variables(step: ModelStep, prefix: Path) -> None:
    """Writes the files from here: a ps may run on a host that doesn't see the disk.

    Only one batch is in this process at a time; each becomes a file of its own, and then all of them one checkpoint.
    """
    written: list[str] = []
    try:
        for batch in _batches(step):
            written.append(f"{prefix}.{len(written)}")
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=written[-1],
                    tensor_names=[entry.name for entry in batch],
                    shape_and_slices=[entry.rows for entry in batch],
                    tensors=[entry.piece.read() for entry in batch],
                )
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=written, destination_prefix=str(prefix), delete_old_dirs=False
            )
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError):
        raise  # a task that holds variables is gone: nothing is wrong with the disk
    except tf.errors.OpError as error:
        raise OSError(shortened(error).message) from error


def _read_variables(step: ModelStep, prefix: Path, *, optimizer: bool) -> None:
    """Reads what `_write_variables` has written, however many shards it was written from."""
    for batch in _batches(step, optimizer=optimizer):
        with tf.device("CPU:0"):
            values = tf.raw_ops.RestoreV2(
                prefix=str(prefix),
                tensor_names=[entry.name for entry in batch],
                shape_and_slices=[entry.rows for entry in batch],
                dtypes=[entry.piece.dtype for entry in batch],
            )
        for entry, value in zip(batch, values, strict=True):
            entry.piece.write(value)


def _optimizer_name(step: ModelStep) -> str:
    return type(innermost(step.model.optimizer)).__name__


def _read_state(path: Path) -> TrainingState:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        seal, form = values.pop("seal", None), values.get("format")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if form != _FORMAT:
        raise Damaged(f"{path} has format {form}, which this version of tfdist cannot read")
    if seal != _seal(values):
        raise Damaged(f"{path} has been changed since it was written")
    return TrainingState(**values)


def _sealed(state: TrainingState) -> dict[str, Any]:
    """The state as it is written, with a digest of itself."""
    values = asdict(state)
    return values | {"seal": _seal(values)}


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _shapes(step: ModelStep) -> list[list[Any]]:
    variables: Iterator[keras.Variable] = iter([*step.parameters, *step.state, *step.model.optimizer.variables])
    return [[variable.path, variable.dtype, list(variable.shape)] for variable in variables]


def _difference(saved: list[list[Any]], wanted: list[list[Any]]) -> str:
    for (path, dtype, shape), (own, own_dtype, own_shape) in zip(saved, wanted, strict=False):
        if (dtype, shape) != (own_dtype, own_shape):
            return f"its {path} is {dtype} {tuple(shape)}, the model's {own} is {own_dtype} {tuple(own_shape)}"
    return f"it has {len(saved)} variables, the model and its optimizer have {len(wanted)}"


def _write_synced(path: Path, value: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
