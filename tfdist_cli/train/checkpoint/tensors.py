"""The variables of a training as files in TensorFlow's own format, and back, a few pieces at a time.

The chief alone writes and reads the files: a ps may run on a host that doesn't see the disk. What is written may be
the variables as they are, while nothing trains, or a `Snapshot` of them, while training goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf

from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.op_errors import shortened
from tfdist_cli.train.variables.sharding import Block, Whole, parts, pieces

FILE_BYTES = 64 * 2**20
"""What one data file holds of variables, and the chief while it writes or reads it; a larger variable that is not
spread has one for itself."""

Read = Callable[[Block | Whole], tf.Tensor]
"""Where a piece's value comes from."""


def live(piece: Block | Whole) -> tf.Tensor:
    """The value that a piece has now."""
    return piece.read()


class Snapshot:
    """The values that all variables of a training have at one moment, each kept where its variable is.

    A read shares the variable's memory; the update that comes next copies it first (`PrepareToUpdateVariable` in
    TensorFlow's training_op_helpers.h), or the read has copied it, where rows are updated. So it takes hardly any
    time, and up to as much memory as the variables take, each given back when it has been written.

    Args:
        step: the model, built; no step is under way.
    """

    def __init__(self, step: ModelStep) -> None:
        self._held: dict[int, tf.Tensor] = {}
        groups: dict[tuple[str, tf.DType], list[tf.Tensor]] = defaultdict(list)
        for variable in saved_variables(step):
            for part in parts(variable):
                with tf.device(part.device):
                    value = tf.convert_to_tensor(part)
                self._held[id(part)] = value
                groups[part.device, value.dtype].append(value)
        for (device, _), values in groups.items():
            # A read on another host has been asked for, not made, until something that needs it has an answer.
            with tf.device(device):
                tf.raw_ops.ShapeN(input=values)[0].numpy()

    def read(self, piece: Block | Whole) -> tf.Tensor:
        """A piece's value, once: what has been read is let go."""
        if isinstance(piece, Whole):
            return self._held.pop(id(piece.stored))
        rest = [0] * (len(piece.shard.shape) - 1)
        with tf.device(piece.shard.device):
            rows = tf.slice(self._held[id(piece.shard)], [piece.start, *rest], [piece.count, *(-1 for _ in rest)])
        if piece.start + piece.count == piece.shard.shape[0]:
            del self._held[id(piece.shard)]
        return rows


def saved_variables(step: ModelStep) -> list[keras.Variable]:
    """All that is saved, in its order: what is learned, other state, the optimizer's own."""
    return [*step.parameters, *step.state, *step.model.optimizer.variables]


def largest_share(step: ModelStep) -> int:
    """Bytes that the one of the tasks keeps which keeps the most of what is saved."""
    shares: dict[str, int] = defaultdict(int)
    for variable in saved_variables(step):
        for part in parts(variable):
            shares[part.device] += Whole(part).bytes
    return max(shares.values(), default=0)


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


def write_variables(step: ModelStep, prefix: Path, read: Read = live) -> None:
    """Writes the files.

    Only one batch is in this process at a time; each becomes a file of its own, and then all of them one checkpoint.

    Args:
        step: the model, built.
        prefix: how the files' names begin.
        read: where the values come from.

    Raises:
        OSError: the files cannot be written.
        tf.errors.OpError: a task that holds variables is gone.
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
                    tensors=[read(entry.piece) for entry in batch],
                )
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=written, destination_prefix=str(prefix), delete_old_dirs=False
            )
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError):
        raise  # a task that holds variables is gone: nothing is wrong with the disk
    except tf.errors.OpError as error:
        raise OSError(shortened(error).message) from error


def read_variables(step: ModelStep, prefix: Path, *, optimizer: bool) -> None:
    """Reads what `write_variables` has written, however many shards it was written from."""
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
