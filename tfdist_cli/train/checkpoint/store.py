"""Checkpoints: a folder for each, written to the side, made visible whole, checked when read.

    CHECKPOINTS/step-00001200/variables.index, variables.data-*    TensorFlow's own format, 64 MiB in a file
                              callbacks.npz                         arrays that callbacks keep, if any do
                              state.json                            all else; each file's size and SHA-256, and its own
    CHECKPOINTS/damaged-step-00001000                               one that was found not to be whole, set aside
    CHECKPOINTS/evaluator.json                                      what an evaluator has scored, if there is one

A folder gets its name, by one rename, after all that is in it has reached the disk. What has no name yet is none.
Only the training changes the folder; an evaluator and an export read, and write no more than `evaluator.json`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.run_files import read_bytes, read_object, whole
from tfdist_cli.train.checkpoint.durable_files import digest_of, remove, sync, write_synced
from tfdist_cli.train.checkpoint.tensors import Read, live, read_variables, saved_variables, write_variables
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import innermost

STATE_FILE = "state.json"
SCORED_FILE = "evaluator.json"
ARRAYS_FILE = "callbacks.npz"
UNSCORED_KEPT = 16
"""Checkpoints kept beyond `keep` for an evaluator that has not come to them yet."""
_PREFIX = "step-"
_WRITING = ".writing-"
_REPLACED = ".replaced-"
_REMOVING = ".removing-"
_DAMAGED = "damaged-"
_FORMAT = 1
_STEP = re.compile(r"[0-9]{8,18}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds beside variables and arrays.

    Args:
        step: global steps done.
        epoch: epochs whose end has been dealt with: validation and callbacks have had their turn.
        final: whether the training was over.
        stopped: where a callback has ended the training, the step it would have gone to; 0 where none has.
        steps_per_epoch: global steps in an epoch.
        origin: the global step at which the first epoch would have begun had all been of this length.
        sharers: among how many workers, or replicas, the data was dealt out; 0 where an earlier version has not said.
        batches: batches that all of them together have taken of it.
        totals: what the metrics have counted in the epoch under way, as `MetricTotals` packs it.
        callbacks: what they have come to know, as `CallbackStates` writes it.
        random: the process's own random number generators, as `random_states` gives them.
        optimizer: the optimizer's class; others have variables of the same shapes that mean something else.
        shapes: `[path, dtype, shape]` of each variable, in the order they are saved in.
        files: `{name: [bytes, SHA-256]}`.
    """

    step: int
    epoch: int
    final: bool = False
    stopped: int = 0
    steps_per_epoch: int = 0
    origin: int = 0
    sharers: int = 0
    batches: int = 0
    totals: list[float] = field(default_factory=list)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    shapes: list[list[Any]] = field(default_factory=list)
    files: dict[str, list[Any]] = field(default_factory=dict)
    format: int = _FORMAT


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk."""

    path: Path
    state: TrainingState

    def arrays(self) -> list[np.ndarray]:
        """The arrays that it holds beside variables."""
        if ARRAYS_FILE not in self.state.files:
            return []
        with np.load(self.path / ARRAYS_FILE, allow_pickle=False) as stored:
            return [stored[f"arr_{number}"] for number in range(len(stored.files))]


class Damaged(Exception):
    """A checkpoint folder that is not whole."""


class CheckpointFolder:
    """The checkpoints of one training.

    Args:
        path: the folder; made when the training begins.
        keep: how many of the newest stay.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path
        self._keep = keep
        self._latest: TrainingState | None = None
        self._made = False

    def begin(self) -> None:
        """Gets the folder ready for a training: finishes or clears away what one that was killed had begun.

        Raises:
            TrainingError: nothing can be written there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._made = True
            self._put_back()
            for pattern in (f"{_WRITING}*", f"{_REMOVING}*", f"{_PREFIX}*/.{STATE_FILE}.*"):
                for rest in self.path.glob(pattern):
                    remove(rest)
            probe = self.path / f"{_WRITING}probe"
            probe.mkdir()
            write_synced(probe / STATE_FILE, {})
            remove(probe)
            sync(self.path)
            sync(self.path.parent)
        except OSError as error:
            if error.errno in _FULL:
                return  # room may be made in time, and each save that fails says so
            raise TrainingError(
                f"checkpoints cannot be written to {self.path}: {error}",
                hint="name another checkpoint.dir, or see to it that this user may write there",
            ) from error

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first, whole or damaged."""
        if not self.path.is_dir():
            return []
        names = [entry.name.removeprefix(_REPLACED) for entry in self.path.iterdir()]
        numbers = [name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)]
        return sorted({int(number) for number in numbers if _STEP.fullmatch(number)})

    def look(self, step: int) -> Found:
        """The checkpoint of a step, as far as can be told without reading all of it: that no file has lost its end.

        Raises:
            Damaged: it is missing or not whole, and why.
        """
        folder = self._folder(step)
        if not folder.exists() and (replaced := self.path / f"{_REPLACED}{folder.name}").exists():
            folder = replaced  # its successor has no name yet
        state = _read_state(folder / STATE_FILE)
        for name, (size, _) in state.files.items():
            with _reading(folder / name):
                found = (folder / name).stat().st_size
            if found != size:
                raise Damaged(f"{folder / name} has {found} bytes instead of {size}")
        return Found(folder, state)

    def find(self, step: int) -> Found:
        """The checkpoint of a step, checked byte for byte.

        Raises:
            Damaged: it is missing or not whole, and why.
        """
        found = self.look(step)
        for name, (_, digest) in found.state.files.items():
            with _reading(found.path / name):
                actual = digest_of(found.path / name)
            if actual != digest:
                raise Damaged(f"{found.path / name} has been changed since it was written")
        return found

    def newest(self) -> tuple[Found | None, dict[int, str]]:
        """The newest whole checkpoint, None when there is none, and by their steps what is wrong with newer ones."""
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                return self.find(step), damaged
            except Damaged as reason:
                damaged[step] = str(reason)
        return None, damaged

    def set_aside(self, step: int) -> Path:
        """Gives a damaged checkpoint another name, under which it is kept for whoever wants to look into it.

        Raises:
            OSError: it cannot be renamed.
        """
        folder = self._folder(step)
        names = [f"{_DAMAGED}{folder.name}", *(f"{_DAMAGED}{folder.name}-{number}" for number in range(2, 1000))]
        aside = next(path for name in names if not (path := self.path / name).exists())
        folder.rename(aside)
        return aside

    def save(
        self,
        step: ModelStep,
        state: TrainingState,
        *,
        arrays: Sequence[np.ndarray] = (),
        read: Read = live,
        changed: bool = True,
    ) -> Path:
        """Writes a checkpoint and removes those that are no longer kept.

        Args:
            step: the model.
            state: what else there is to know.
            arrays: what callbacks keep of arrays.
            read: where the variables' values come from.
            changed: whether variables may have changed since a checkpoint of the same step was saved here.

        Raises:
            OSError: the disk is full, or the folder cannot be written; earlier checkpoints are untouched.
        """
        folder = self._folder(state.step)
        if not self._made:  # there was no room for it at the beginning
            self.path.mkdir(parents=True, exist_ok=True)
        if not (changed or arrays) and self._latest and self._latest.step == state.step:
            return self._restate(folder, state)
        writing = self.path / f"{_WRITING}{state.step:08d}-{os.getpid()}"
        remove(writing)
        try:
            writing.mkdir()  # its folder is there, or somebody has removed it
            write_variables(step, writing / "variables", read)
            if arrays:
                np.savez(writing / ARRAYS_FILE, *arrays)
            files = {entry.name: [entry.stat().st_size, digest_of(entry)] for entry in sorted(writing.iterdir())}
            state = replace(state, optimizer=_optimizer_name(step), shapes=_shapes(step), files=files)
            for name in files:
                sync(writing / name)
            write_synced(writing / STATE_FILE, _sealed(state))
            sync(writing)
            self._make_visible(writing, folder)
        except BaseException:
            remove(writing)
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
        read_variables(step, found.path / "variables", optimizer=optimizer)

    def mark_scored(self, steps: list[int]) -> None:
        """Notes which checkpoints the evaluator has scored."""
        if not steps:
            self.path.mkdir(parents=True, exist_ok=True)
            for rest in self.path.glob(f".{SCORED_FILE}.*"):  # of an evaluator that was killed
                remove(rest)
        write_synced(self.path / SCORED_FILE, {"scored": steps})

    def _folder(self, step: int) -> Path:
        return self.path / f"{_PREFIX}{step:08d}"

    def _make_visible(self, writing: Path, folder: Path) -> None:
        """Gives a whole checkpoint its name; one that had it stays until then, and `look` finds it."""
        replaced = self.path / f"{_REPLACED}{folder.name}"
        if folder.exists():
            remove(replaced)
            folder.rename(replaced)
        try:
            writing.rename(folder)
        except OSError:
            self._put_back()
            raise
        sync(self.path)
        remove(replaced)

    def _put_back(self) -> None:
        """Finishes what was begun in `_make_visible`."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            folder = self.path / replaced.name[len(_REPLACED) :]
            if folder.exists():
                remove(replaced)
            else:
                replaced.rename(folder)

    def _restate(self, folder: Path, state: TrainingState) -> Path:
        """The variables are saved already: only what else there is to know may have changed."""
        if latest := self._latest:
            state = replace(state, optimizer=latest.optimizer, shapes=latest.shapes, files=latest.files)
            if state != latest:
                write_synced(folder / STATE_FILE, _sealed(state))
                self._latest = state
        return folder

    def _prune(self, newest: int) -> None:
        """Removes what is no longer kept, now that a newer one is whole; what is damaged neither counts nor goes."""
        steps = [step for step in self.steps() if step <= newest and self._looks_whole(step)]
        waiting: set[int] = set()
        with contextlib.suppress(OSError, ValueError):  # no evaluator, or what it writes is damaged
            scored = read_object(self.path / SCORED_FILE).get("scored")
            if isinstance(scored, list):
                waiting = set(steps[-(self._keep + UNSCORED_KEPT) :]) - {whole(step) for step in scored}
        for old in steps[: -self._keep]:
            if old not in waiting:
                self._discard(self._folder(old))

    def _discard(self, folder: Path) -> None:
        """Takes a checkpoint its name before its files: half of one is none."""
        removing = self.path / f"{_REMOVING}{folder.name}"
        remove(removing)
        with contextlib.suppress(OSError):  # it stays then
            folder.rename(removing)
            remove(removing)

    def _looks_whole(self, step: int) -> bool:
        try:
            self.look(step)
        except Damaged:
            return False
        return True


def _optimizer_name(step: ModelStep) -> str:
    return type(innermost(step.model.optimizer)).__name__


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error


def _read_state(path: Path) -> TrainingState:
    try:
        values = json.loads(read_bytes(path))
        seal, form, own = values.pop("seal", None), values.get("format"), _seal(values)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if form != _FORMAT:
        raise Damaged(f"{path} has format {form}, which this version of tfdist cannot read")
    if seal != own:
        raise Damaged(f"{path} has been changed since it was written")
    return TrainingState(**values)


def _sealed(state: TrainingState) -> dict[str, Any]:
    """The state as it is written, with a digest of itself."""
    values = asdict(state)
    return values | {"seal": _seal(values)}


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _shapes(step: ModelStep) -> list[list[Any]]:
    return [[variable.path, variable.dtype, list(variable.shape)] for variable in saved_variables(step)]


def _difference(saved: list[list[Any]], wanted: list[list[Any]]) -> str:
    for (path, dtype, shape), (own, own_dtype, own_shape) in zip(saved, wanted, strict=False):
        if (dtype, shape) != (own_dtype, own_shape):
            return f"its {path} is {dtype} {tuple(shape)}, the model's {own} is {own_dtype} {tuple(own_shape)}"
    return f"it has {len(saved)} variables, the model and its optimizer have {len(wanted)}"
