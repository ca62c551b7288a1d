"""Reads a dynamic table from a checkpoint in which it has another number of rows, as before a larger `capacity`.

The row of an id depends on the number of rows. So each id gets a row of the new table, and then the values of its old
one: the vector, the optimizer's slots, and its part of the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.tables.hashing import GROUP, WAYS, unhashed
from tfdist_cli.train.checkpoint.tensors import FILE_BYTES, await_writes, restored, saved_variables, slice_text
from tfdist_cli.train.layers.changed_rows import write_rows
from tfdist_cli.train.layers.dynamic_tables import full_table, row_indices
from tfdist_cli.train.layers.row_index import RowIndex
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.variables.sharding import parts


def rows_of_resized(step: ModelStep, shapes: list[list[Any]]) -> dict[int, int]:
    """Returns which dynamic tables have another number of rows in a checkpoint: the number of a table, and its rows.

    Args:
        step: the model, built.
        shapes: the path, the type and the shape of each variable in the checkpoint.
    """
    places = {id(variable): place for place, variable in enumerate(saved_variables(step))}
    found = {}
    for number, index in enumerate(row_indices(step.model)):
        place = places[id(index.table)]
        rows, *_ = shapes[place][2] if place < len(shapes) and shapes[place][2] else [0]
        if rows != int(index.table.shape[0]) and rows and rows % GROUP == 0:
            found[number] = int(rows)
    return found


def shapes_before(step: ModelStep, resized: Mapping[int, int]) -> list[list[Any]]:
    """Returns the path, the type and the shape of each variable if tables had other numbers of rows."""
    rows: dict[int, int] = {}
    for number, index in enumerate(row_indices(step.model)):
        if number in resized:
            for variable in index.row_variables:
                of_buckets = index.row_shape(variable) == ()
                rows[id(variable)] = resized[number] // WAYS if of_buckets else resized[number]
    shapes = []
    for variable in saved_variables(step):
        shape = list(variable.shape)
        if id(variable) in rows:
            shape[0] = rows[id(variable)]
        shapes.append([variable.path, variable.dtype, shape])
    return shapes


@dataclass(frozen=True)
class Part:
    """Rows of a table in the files of a checkpoint.

    Args:
        prefix: the prefix of the files' paths.
        numbers: the numbers of the rows.
        complete: whether these are all rows of the table.
    """

    prefix: Path
    numbers: np.ndarray
    complete: bool

    def slice_of(self, row_shape: tuple[int, ...], first: int, count: int) -> str:
        """Returns the place of some of the rows in a variable, in TensorFlow's notation."""
        if self.complete and not row_shape:  # an index is saved in buckets
            return slice_text((len(self.numbers) // WAYS, WAYS), first // WAYS, count // WAYS)
        return slice_text((len(self.numbers), *row_shape), first, count)


def read_resized(index: RowIndex, variables: list[tuple[str, keras.Variable]], saved: list[Part]) -> None:
    """Reads a table that has another number of rows. Ids that find no row in a table with `evict` lose theirs.

    Args:
        index: the index of the table.
        variables: the variables of the table with their names in the files.
        saved: the parts of the checkpoint, the full one first.

    Raises:
        TrainingError: the table does not evict, and has too few rows.
    """
    newest = np.zeros(len(saved[0].numbers), np.int32)
    for number, part in enumerate(saved):
        newest[part.numbers] = number
    index.clear()
    try:
        for number, part in enumerate(saved):
            for first, count in _steps(index, len(part.numbers)):
                own = part.numbers[first : first + count]
                _move(index, variables, part, first, own, newest[own] == number)
    except tf.errors.InvalidArgumentError as error:
        if full := full_table(error):
            raise full from error
        raise
    await_writes({shard.device for _, variable in variables for shard in parts(variable)})


def _steps(index: RowIndex, rows: int) -> Iterator[tuple[int, int]]:
    row_bytes = sum(
        tf.as_dtype(each.dtype).size * int(np.prod(index.row_shape(each), dtype=np.int64))
        for each in index.row_variables
    )
    step = max(1, FILE_BYTES // row_bytes // GROUP) * GROUP
    yield from ((first, min(step, rows - first)) for first in range(0, rows, step))


def _move(
    index: RowIndex,
    variables: list[tuple[str, keras.Variable]],
    part: Part,
    first: int,
    numbers: np.ndarray,
    wanted: np.ndarray,
) -> None:
    """Moves some rows of a part.

    Args:
        index: the index of the table.
        variables: the variables of the table with their names in the files.
        part: the part.
        first: the place of the rows in it.
        numbers: their old numbers.
        wanted: which of them are not in a later part.
    """
    values = restored(
        part.prefix,
        [
            (name, part.slice_of(index.row_shape(each), first, len(numbers)), tf.as_dtype(each.dtype))
            for name, each in variables
        ],
    )
    keys = next(
        value.numpy().reshape(-1) for (_, each), value in zip(variables, values, strict=True) if each is index.keys
    )
    from_ = np.flatnonzero(wanted & (keys != 0))
    to = index.place(tf.constant(unhashed(keys[from_])))
    from_, to = from_[to >= 0], to[to >= 0]
    default = np.flatnonzero(wanted & (numbers == 0))
    from_, to = np.concatenate([default, from_]), np.concatenate([np.zeros(len(default), np.int32), to])
    order = np.argsort(to)
    for (_, variable), value in zip(variables, values, strict=True):
        of_rows = tf.reshape(value, [len(numbers), *index.row_shape(variable)])
        write_rows(index, variable, to[order], tf.gather(of_rows, from_[order]))
