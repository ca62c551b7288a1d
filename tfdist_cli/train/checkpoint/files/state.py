"""The state of a training in a checkpoint, sealed by a digest, and the check of the files that belong to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.protocol.run_files import read_bytes
from tfdist_cli.spec.path_scheme import Location, Url
from tfdist_cli.train.checkpoint.durable_files import digest_of

STATE_FILE = "state.json"
ARRAYS_FILE = "callbacks.npz"
_FORMAT = 1
DELTA_FORMAT = 2
"""That of checkpoints with deltas, which older versions cannot read."""


@dataclass(frozen=True)
class TrainingState:
    """The state of a training beside variables and arrays, written as state.json.

    Args:
        step: global steps done.
        epoch: epochs whose end is recorded: their validation and callbacks have run.
        final: whether the training was complete.
        stopped: if a callback stopped the training, the step at which it was to end; otherwise 0.
        steps_per_epoch: global steps in an epoch.
        origin: the global step at which the first epoch would have begun if all epochs had this length.
        sharers: the number of workers, or replicas, that the data was divided among; 0 if written by a version that
            did not record it.
        batches: batches of the data that all of them together have trained on.
        epoch_batches: how many of them in the current epoch.
        totals: the sums of the metrics in the current epoch, as `MetricTotals` packs them.
        callbacks: the state of the callbacks, as `CallbackStates` returns it.
        random: the states of the process's random number generators, as `random_states` returns them.
        optimizer: the optimizer's class; another class may have variables of the same shapes with another meaning.
        shapes: `[path, dtype, shape]` of each variable, in the order in which they are saved.
        files: `{name: [bytes, SHA-256]}`.
        steps_per_pass: the steps of a pass over the data, within which epochs end; 0 if epochs continue across passes.
        local_steps: the steps that each worker has taken, for reports.
        worker_steps: `Engine.worker_steps`.
        lengths: the elements of each worker's shard of the data, if they were counted.
        deltas: how many deltas the checkpoint consists of, beside the files of a full one; 0 if it is full.
        full_step: the step of that full one; 0 if the checkpoint is full.
    """

    step: int
    epoch: int
    final: bool = False
    stopped: int = 0
    steps_per_epoch: int = 0
    origin: int = 0
    sharers: int = 0
    batches: int = 0
    epoch_batches: int = 0
    totals: list[float] = field(default_factory=list)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    shapes: list[list[Any]] = field(default_factory=list)
    files: dict[str, list[Any]] = field(default_factory=dict)
    format: int = _FORMAT
    steps_per_pass: int = 0
    local_steps: dict[str, int] = field(default_factory=dict)
    worker_steps: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    deltas: int = 0
    full_step: int = 0

    @property
    def shared_step(self) -> int:
        """The step of the full checkpoint whose files it consists of: its own if it is full."""
        return self.full_step if self.deltas else self.step


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk.

    Args:
        path: its folder.
        state: its state.
        url: where it was downloaded from, if `path` is a copy.
    """

    path: Path
    state: TrainingState
    url: Url | None = None

    @property
    def location(self) -> Location:
        """Where it is stored."""
        return self.url or self.path

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays of callbacks."""
        if ARRAYS_FILE not in self.state.files:
            return []
        with np.load(self.path / ARRAYS_FILE, allow_pickle=False) as stored:
            return [stored[f"arr_{number}"] for number in range(len(stored.files))]


class DamagedCheckpoint(Exception):
    """A checkpoint that is missing or incomplete, or was changed; the message says which."""


@contextlib.contextmanager
def read_errors_as_damage(path: Path) -> Iterator[None]:
    """Within the context, a file that cannot be read is damage."""
    try:
        yield
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def verify(checkpoint: StoredCheckpoint) -> None:
    """Compares the SHA-256 of each file of a checkpoint.

    Raises:
        DamagedCheckpoint: one is missing, or was changed.
    """
    for name, (_, digest) in checkpoint.state.files.items():
        path = checkpoint.path / name
        with read_errors_as_damage(path):
            actual = digest_of(path)
        if actual != digest:
            raise DamagedCheckpoint(f"{checkpoint.location}/{name} has been changed since it was written")


def read_state(path: Path) -> TrainingState:
    """Returns the state in a file.

    Raises:
        DamagedCheckpoint: it is missing or damaged.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    return parse_state(content, str(path))


def parse_state(content: bytes, path: str) -> TrainingState:
    """Returns the state in a state.json.

    Args:
        content: its content.
        path: where it is, for messages.

    Raises:
        DamagedCheckpoint: it is damaged.
    """
    try:
        values = json.loads(content)
        seal, version, own = values.pop("seal", None), values.get("format"), _seal(values)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if version not in (_FORMAT, DELTA_FORMAT):
        raise DamagedCheckpoint(f"{path} has format {version}, which this version of tfdist cannot read")
    if seal != own:
        raise DamagedCheckpoint(f"{path} has been changed since it was written")
    return TrainingState(**values)


def sealed(state: TrainingState) -> dict[str, Any]:
    """Returns the content of state.json, with a digest of it."""
    values = asdict(state)
    return values | {"seal": _seal(values)}


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
