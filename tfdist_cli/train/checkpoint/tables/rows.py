"""The rows of dynamic tables in the files of a checkpoint, for programs without TensorFlow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist_cli.tables.hashing import WAYS, unhashed
from tfdist_cli.tables.layout import Rows, TableShape
from tfdist_cli.train.checkpoint.files.deltas import delta_prefix, numbers_name
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.tensors import FILE_BYTES, VARIABLES, named_variables, restored, slice_text
from tfdist_cli.train.layers.dynamic_tables import row_indices
from tfdist_cli.train.layers.row_index import RowIndex
from tfdist_cli.train.model.train_step import ModelStep

_PORTABLE = {"float16", "float32", "float64"}
"""Types that NumPy has itself. Other ones are pushed as float32, which has all their values."""


@dataclass(frozen=True)
class _Table:
    """A table and the names of its variables in the files.

    Args:
        number: its number among the tables.
        index: its index.
        table: the name of the rows.
        keys: that of the index's keys.
        count: that of the counts of uses.
        strings: that of the strings of ids; None if they are not kept.
    """

    number: int
    index: RowIndex
    table: str
    keys: str
    count: str
    strings: str | None

    @property
    def shape(self) -> TableShape:
        rows, width = self.index.table.shape
        own = str(self.index.table.dtype)
        name = self.index.table.path.rpartition("/")[0] or self.index.table.path
        return TableShape(name, int(rows), int(width), own if own in _PORTABLE else "float32")

    @property
    def string_width(self) -> int:
        """The bytes of a row's string; 0 if strings are not kept."""
        return 0 if self.index.strings is None else int(self.index.strings.shape[1])

    @property
    def row_bytes(self) -> int:
        """About the bytes of a row in the files."""
        return 4 * self.shape.width + 16 + self.string_width


class StoredRows:
    """Reads the rows of a model's dynamic tables from the files of its checkpoints, in pieces.

    Args:
        step: the model, built.
    """

    def __init__(self, step: ModelStep) -> None:
        names = {id(variable): name for name, variable in named_variables(step)}
        self._tables = []
        for number, index in enumerate(row_indices(step.model)):
            table, keys, count = (names[id(each)] for each in (index.table, index.keys, index.count))
            self._tables.append(_Table(number, index, table, keys, count, names.get(id(index.strings))))

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def shapes(self) -> list[TableShape]:
        """The tables."""
        return [each.shape for each in self._tables]

    def pieces(self, folder: Path, first: int, deltas: int) -> Iterator[tuple[int, Rows]]:
        """Yields rows with the number of their table, in the order in which they are to be applied.

        Args:
            folder: the folder of the checkpoint's files.
            first: the first part to read: 0 for the full checkpoint, and n for its n-th delta.
            deltas: the last one.
        """
        for part in range(first, deltas + 1):
            for each in self._tables:
                found = self._changed(each, delta_prefix(folder, part)) if part else self._all(each, folder / VARIABLES)
                yield from ((each.number, rows) for rows in found)

    def _all(self, table: _Table, prefix: Path) -> Iterator[Rows]:
        """The rows of a full checkpoint that belong to ids, and the row 0."""
        shape = table.shape
        for first, size in _steps(shape.rows, table.row_bytes, unit=WAYS):
            number = np.arange(first, first + size, dtype=np.int32)
            of_index = slice_text((shape.rows // WAYS, WAYS), first // WAYS, size // WAYS)
            rows = self._read(table, prefix, number, (shape.rows, first), of_index)
            used = rows.present | (rows.rows == 0)
            if used.any():
                yield rows.of(used)

    def _changed(self, table: _Table, prefix: Path) -> Iterator[Rows]:
        """The rows of a delta."""
        (found,) = restored(prefix, [(numbers_name(table.number), "", tf.int32)])
        numbers = found.numpy()
        for first, size in _steps(len(numbers), table.row_bytes):
            of_index = slice_text((len(numbers),), first, size)
            yield self._read(table, prefix, numbers[first : first + size], (len(numbers), first), of_index)

    def _read(self, table: _Table, prefix: Path, numbers: np.ndarray, place: tuple[int, int], of_index: str) -> Rows:
        """Reads some rows.

        Args:
            table: the table.
            prefix: the prefix of the files' paths.
            numbers: the numbers of the rows.
            place: how many rows the files have, and the first one to read.
            of_index: the place of the rows in the variables of the index.
        """

        def of_rows(width: int) -> str:
            return slice_text((place[0], width), place[1], len(numbers))

        wanted = [
            (table.table, of_rows(table.shape.width), tf.as_dtype(table.index.table.dtype)),
            (table.keys, of_index, tf.int64),
            (table.count, of_index, tf.int32),
        ]
        if table.strings:
            wanted.append((table.strings, of_rows(table.string_width), tf.uint8))
        values, keys, counts, *strings = restored(prefix, wanted)
        key = keys.numpy().reshape(-1)
        present = (key != 0) & (counts.numpy().reshape(-1) >= _least_uses(table.index))
        ids = np.where(present, unhashed(key), 0)
        own = np.where(present[:, None], strings[0].numpy(), np.uint8(0)) if strings else None
        return Rows(numbers, ids, present, tf.cast(values, table.shape.dtype).numpy(), own)


def parts_of(state: TrainingState) -> list[str]:
    """Returns the digests of the parts of a checkpoint: those of the full one and of each delta."""
    prefixes = [VARIABLES, *(delta_prefix(Path(), number).name for number in range(1, state.deltas + 1))]
    found = []
    for prefix in prefixes:
        own = sorted((name, *entry) for name, entry in state.files.items() if name.partition(".")[0] == prefix)
        found.append(hashlib.sha256(repr(own).encode()).hexdigest())
    return found


def _least_uses(index: RowIndex) -> int:
    """The uses from which an id has its row."""
    return index.policy.admit_after if index.policy.admit_after > 1 else 0


def _steps(rows: int, row_bytes: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Yields the first row and the number of rows of pieces of at most about `FILE_BYTES`."""
    step = max(1, FILE_BYTES // row_bytes // unit) * unit
    yield from ((first, min(step, rows - first)) for first in range(0, rows, step))
