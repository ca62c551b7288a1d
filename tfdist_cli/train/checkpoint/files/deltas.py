"""Delta checkpoints: what has changed since the checkpoint before, and the files of that one.

The files `delta-1`, `delta-2` … hold of dynamic tables some rows, with their numbers in table N as `rows/N`, and all
other variables completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.checkpoint.durable_files import link
from tfdist_cli.train.checkpoint.files.resized_tables import Part, read_resized
from tfdist_cli.train.checkpoint.files.state import ARRAYS_FILE, StoredCheckpoint, TrainingState
from tfdist_cli.train.checkpoint.tensors import (
    FILE_BYTES,
    VARIABLES,
    Entry,
    Given,
    ReadPiece,
    await_writes,
    entries_of,
    named_variables,
    pieces_of,
    read_entries,
    restored,
    slice_text,
    write_entries,
)
from tfdist_cli.train.layers.changed_rows import ChangedRows, write_rows
from tfdist_cli.train.layers.dynamic_tables import row_indices
from tfdist_cli.train.layers.row_index import RowIndex
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.variables.sharding import parts


def write_changes(step: ModelStep, prefix: Path, read: ReadPiece, changed: Sequence[ChangedRows]) -> None:
    """Writes what has changed to files. For the errors see `write_entries`.

    Args:
        step: the model, built.
        prefix: the prefix of the files' paths.
        read: returns a piece's value.
        changed: what has changed in the model's dynamic tables.
    """
    write_entries(_changed_entries(step, changed), prefix, read)


def _changed_entries(step: ModelStep, changed: Sequence[ChangedRows]) -> Iterator[Entry]:
    """Yields the entries of a delta: variables, the changed rows of tables, and the numbers of these rows."""
    for name, variable in named_variables(step):
        if pieces_of(changed, variable) is None:
            yield from entries_of([(name, variable)])
    for number, each in enumerate(changed):
        yield Entry(numbers_name(number), "", Given(tf.constant(each.numbers())))
        for name, variable in named_variables(step):
            for piece in each.pieces(variable) or ():
                shape = each.count, *piece.row_shape
                yield Entry(name, slice_text(shape, piece.first, piece.count), piece)


def numbers_name(number: int) -> str:
    """The name of the numbers of the changed rows of a table."""
    return f"rows/{number}"


def read_variables(
    step: ModelStep, folder: Path, *, optimizer: bool, deltas: int = 0, resized: Mapping[int, int] | None = None
) -> None:
    """Reads the files of a checkpoint into the variables; these may have another number of shards.

    Args:
        step: the model, built.
        folder: the folder of the files.
        optimizer: whether to read the optimizer's variables, too.
        deltas: how many deltas there are.
        resized: the numbers of the dynamic tables that have another number of rows in the files, and that number.
    """
    named = list(named_variables(step, optimizer=optimizer))
    for number, rows in (resized or {}).items():
        index = row_indices(step.model)[number]
        own = {id(variable) for variable in index.row_variables}
        read_resized(index, [each for each in named if id(each[1]) in own], list(_parts(folder, number, rows, deltas)))
        named = [each for each in named if id(each[1]) not in own]
    indices = row_indices(step.model) if deltas else []
    of_tables = {id(variable) for index in indices for variable in index.row_variables}
    read_entries(folder / VARIABLES, [each for each in named if not deltas or id(each[1]) in of_tables])
    for delta in range(1, deltas + 1):
        for number, index in enumerate(indices):
            own = {id(variable) for variable in index.row_variables}
            _read_rows(delta_prefix(folder, delta), number, index, [each for each in named if id(each[1]) in own])
    if deltas:
        read_entries(delta_prefix(folder, deltas), [each for each in named if id(each[1]) not in of_tables])


def _parts(folder: Path, number: int, rows: int, deltas: int) -> Iterator[Part]:
    """Yields the parts of a checkpoint that hold rows of a table."""
    yield Part(folder / VARIABLES, np.arange(rows, dtype=np.int32), complete=True)
    for delta in range(1, deltas + 1):
        prefix = delta_prefix(folder, delta)
        yield Part(prefix, restored(prefix, [(numbers_name(number), "", tf.int32)])[0].numpy(), complete=False)


def delta_prefix(folder: Path, number: int) -> Path:
    """Returns the prefix of the files of a delta, counted from 1."""
    return folder / f"delta-{number}"


def _read_rows(prefix: Path, number: int, index: RowIndex, variables: Iterable[tuple[str, keras.Variable]]) -> None:
    """Reads the changed rows of a table."""
    (found,) = restored(prefix, [(numbers_name(number), "", tf.int32)])
    numbers = found.numpy()
    for name, variable in variables:
        shape = index.row_shape(variable)
        dtype = tf.as_dtype(variable.dtype)
        step = max(1, FILE_BYTES // (dtype.size * int(np.prod(shape, dtype=np.int64))))
        for first in range(0, len(numbers), step):
            own = numbers[first : first + step]
            (values,) = restored(prefix, [(name, slice_text((len(numbers), *shape), first, len(own)), dtype)])
            write_rows(index, variable, own, values)
        await_writes({part.device for part in parts(variable)})


def refer(writing: Path, base: StoredCheckpoint, state: TrainingState) -> TrainingState:
    """Adds the files of the checkpoint before a delta. Returns the state with their sizes and digests.

    Args:
        writing: the folder of the delta, with its own files.
        base: the checkpoint before it.
        state: the state of the delta, with its own files.
    """
    before = {name: entry for name, entry in base.state.files.items() if name != ARRAYS_FILE}
    for name in before:
        link(base.path / name, writing / name)
    return replace(state, files={**before, **state.files}, full_step=base.state.shared_step)
