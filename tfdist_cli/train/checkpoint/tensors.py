"""Variables to and from files in TensorFlow's checkpoint format, a few pieces at a time.

The files `variables` hold all variables.

Only the chief writes and reads the files: a ps may run on a host that does not see the disk. The chief writes the live
variables while training is paused, or a `Snapshot` of them while training continues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.layers.changed_rows import ChangedRows, RowsPiece
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.op_errors import shortened
from tfdist_cli.train.variables.sharding import Block, Whole, parts, pieces

FILE_BYTES = 64 * 2**20
"""The most bytes of variables in one data file, and in the chief's memory while it writes or reads that file. A larger
variable that is not sharded has its own file."""

VARIABLES = "variables"
"""The prefix of the files with all variables."""


@dataclass(frozen=True, eq=False)
class Given:
    """A piece whose value the chief has."""

    value: tf.Tensor

    @property
    def bytes(self) -> int:
        """The size of the value."""
        return self.value.dtype.size * int(self.value.shape.num_elements())

    @property
    def dtype(self) -> tf.DType:
        """The type of the value."""
        return self.value.dtype

    def read(self) -> tf.Tensor:
        """Returns the value."""
        return self.value


Piece = Block | Whole | RowsPiece | Given
ReadPiece = Callable[[Any], tf.Tensor]
"""A function that returns the value of a `Piece`."""


def read_live(piece: Piece) -> tf.Tensor:
    """Returns a piece's current value."""
    return piece.read()


class Snapshot:
    """The values of all variables of a training at one moment, each on the device of its variable.

    A read shares the variable's memory. The next update copies it first (`PrepareToUpdateVariable` in TensorFlow's
    training_op_helpers.h); if the variable's rows are updated, the read has copied it already. So a snapshot takes
    almost no time, and at most as much memory as the variables, which is freed piece by piece as they are written.

    Changed rows of a table are copied.

    Args:
        step: the model, built; no step is running.
        changed: what is read of the model's dynamic tables; None for all of them.
    """

    def __init__(self, step: ModelStep, changed: Sequence[ChangedRows] | None = None) -> None:
        self._values: dict[int, tf.Tensor] = {}
        groups: dict[tuple[str, tf.DType], list[tf.Tensor]] = defaultdict(list)
        for variable in saved_variables(step):
            rows = pieces_of(changed, variable)
            for part in parts(variable) if rows is None else rows:
                device = part.shard.device if isinstance(part, RowsPiece) else part.device
                with tf.device(device):
                    value = part.read() if isinstance(part, RowsPiece) else tf.convert_to_tensor(part)
                self._values[id(part)] = value
                groups[device, value.dtype].append(value)
        for (device, _), values in groups.items():
            # A read on another host has only been requested until an op that needs it returns.
            with tf.device(device):
                tf.raw_ops.ShapeN(input=values)[0].numpy()

    def read(self, piece: Piece) -> tf.Tensor:
        """Returns a piece's value, and frees it. Each piece can be read once."""
        if isinstance(piece, Given):
            return piece.read()
        if isinstance(piece, RowsPiece):
            return self._values.pop(id(piece))
        if isinstance(piece, Whole):
            return self._values.pop(id(piece.stored))
        rest = [0] * (len(piece.shard.shape) - 1)
        with tf.device(piece.shard.device):
            rows = tf.slice(self._values[id(piece.shard)], [piece.start, *rest], [piece.count, *(-1 for _ in rest)])
        if piece.start + piece.count == piece.shard.shape[0]:
            del self._values[id(piece.shard)]
        return rows


def saved_variables(step: ModelStep) -> list[keras.Variable]:
    """Returns the variables that a checkpoint holds, in their order: parameters, other state, the optimizer's."""
    return [*step.parameters, *step.saved_state, *step.optimizer_variables]


def largest_task_bytes(step: ModelStep, changed: Sequence[ChangedRows] | None = None) -> int:
    """Returns the bytes to save on the device that holds the most of them. For the arguments see `Snapshot`."""
    bytes_of: dict[str, int] = defaultdict(int)
    for variable in saved_variables(step):
        rows = pieces_of(changed, variable)
        for part in map(Whole, parts(variable)) if rows is None else rows:
            bytes_of[part.shard.device if isinstance(part, RowsPiece) else part.stored.device] += part.bytes
    return max(bytes_of.values(), default=0)


def pieces_of(changed: Sequence[ChangedRows] | None, variable: keras.Variable) -> list[RowsPiece] | None:
    """Returns the changed rows of a variable; None if all of it is saved."""
    return next((rows for each in changed or () if (rows := each.pieces(variable)) is not None), None)


@dataclass(frozen=True)
class Entry:
    """A piece of a variable and its place in the files.

    Args:
        name: the variable's name in the files, as `tf.train.Checkpoint` would name it.
        rows: the rows of the piece in TensorFlow's notation: `10 4 0,3:-` for the first 3 rows of a 10 × 4 variable;
            empty for the whole variable.
        piece: the piece.
    """

    name: str
    rows: str
    piece: Any


def named_variables(step: ModelStep, *, optimizer: bool = True) -> Iterator[tuple[str, keras.Variable]]:
    """Yields all saved variables with their names in the files."""
    groups = {"parameters": step.parameters, "state": step.saved_state}
    if optimizer:
        groups["optimizer"] = step.optimizer_variables
    for group, variables in groups.items():
        for number, variable in enumerate(variables):
            yield f"{group}/{number}/.ATTRIBUTES/VARIABLE_VALUE", variable


def entries_of(variables: Iterable[tuple[str, keras.Variable]]) -> Iterator[Entry]:
    """Yields the entries of complete variables."""
    for name, variable in variables:
        for piece in pieces(variable):
            yield Entry(name, _rows(variable, piece), piece)


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yields the entries of a checkpoint in batches; a batch of several entries has at most `FILE_BYTES`."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        if batch and size + entry.piece.bytes > FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.piece.bytes
    yield batch


def _rows(variable: keras.Variable, piece: Block | Whole) -> str:
    if isinstance(piece, Whole):
        return ""
    return slice_text(variable.shape, piece.first, piece.count)


def slice_text(shape: Iterable[int], first: int, count: int) -> str:
    """Returns some rows of a variable in TensorFlow's notation, as in `Entry`."""
    sizes = [str(size) for size in shape]
    return f"{' '.join(sizes)} {first},{count}{':-' * (len(sizes) - 1)}"


def write_variables(step: ModelStep, prefix: Path, read: ReadPiece = read_live) -> None:
    """Writes all saved variables to files. For the arguments and errors see `write_entries`.

    Args:
        step: the model, built.
        prefix: the prefix of the files' paths.
        read: returns a piece's value.
    """
    write_entries(entries_of(named_variables(step)), prefix, read)


def write_entries(entries: Iterable[Entry], prefix: Path, read: ReadPiece) -> None:
    """Writes pieces of variables to files.

    Only one batch is in this process's memory at a time. Each batch is written to its own file; then all files are
    merged into one checkpoint.

    Args:
        entries: the pieces.
        prefix: the prefix of the files' paths.
        read: returns a piece's value.

    Raises:
        OSError: the files cannot be written.
        tf.errors.OpError: a task that holds variables has failed.
    """
    written: list[str] = []
    try:
        for batch in _batches(entries):
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
        raise  # a task that holds variables has failed, not the disk
    except tf.errors.OpError as error:
        raise OSError(shortened(error).message) from error


def read_entries(prefix: Path, variables: Iterable[tuple[str, keras.Variable]]) -> None:
    """Reads complete variables from files."""
    for batch in _batches(entries_of(variables)):
        if batch:
            values = restored(prefix, [(entry.name, entry.rows, entry.piece.dtype) for entry in batch])
            for entry, value in zip(batch, values, strict=True):
                entry.piece.write(value)
            await_writes({entry.piece.device for entry in batch})


def names_in(prefix: Path) -> set[str]:
    """Returns the names of all variables in files."""
    return set(tf.train.load_checkpoint(str(prefix)).get_variable_to_shape_map())


def restored(prefix: Path, wanted: Sequence[tuple[str, str, tf.DType]]) -> list[tf.Tensor]:
    """Reads tensors by their names, slices and types."""
    names, slices, dtypes = zip(*wanted, strict=True)
    with tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(
            prefix=str(prefix), tensor_names=list(names), shape_and_slices=list(slices), dtypes=list(dtypes)
        )


def await_writes(devices: Iterable[str]) -> None:
    """Waits until variables on some devices have the values that they were assigned.

    An assignment on another host has only been requested until an op that follows it there returns. Without the wait,
    the values of all batches would be in this process's memory until they are sent.
    """
    for device in devices:
        with tf.device(device):
            tf.raw_ops.Fill(dims=[], value=0).numpy()
