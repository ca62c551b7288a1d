"""Parquet files of numbers: their columns, their rows divided among readers, and the rows as bytes.

A column has numbers or booleans, or lists of them that all have the same length. The footers of the files tell most of
this before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import location
from tfdist_cli.storage.remote_file import open_location

_ROWS = 4096
"""Rows that are read together, at most."""
_NUMBERS = {
    **{name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}
"""The types of numbers: Arrow's name, and NumPy's."""
_PLAIN = "tfdist reads numbers, booleans, and lists of them with one length"


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        name: its name.
        dtype: the NumPy type of its numbers.
        width: the numbers in each of its lists; None if it has no lists.
    """

    name: str
    dtype: str
    width: int | None

    @property
    def bytes(self) -> int:
        """The bytes of one value."""
        return int(np.dtype(self.dtype).itemsize) * (1 if self.width is None else self.width)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a file.

    Args:
        file: the path or address of the file.
        groups: the row groups that contain the rows.
        start: the first row, counted from the start of the first of these row groups.
        stop: the row after the last one, counted in the same way.
        columns: the columns to read.
    """

    file: str
    groups: tuple[int, ...]
    start: int
    stop: int
    columns: tuple[Column, ...]

    def as_text(self) -> str:
        """Returns the piece as JSON."""
        return json.dumps(asdict(self))

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return sum(column.bytes for column in self.columns)

    @classmethod
    def of_text(cls, text: str | bytes) -> Piece:
        """Returns the piece that `as_text` has written."""
        given = json.loads(text)
        columns = tuple(Column(**column) for column in given.pop("columns"))
        return cls(**{**given, "groups": tuple(given["groups"])}, columns=columns)

    def rows(self) -> Iterator[np.ndarray]:
        """Yields the rows as matrices of bytes: those of the first column, then those of the second, and so on.

        Raises:
            ValueError: a column has empty values, or lists of different lengths.
            OSError: the file cannot be read.
        """
        row = 0
        with open_location(location(self.file)) as opened, pyarrow_parquet().ParquetFile(opened) as file:
            names = [column.name for column in self.columns]
            for batch in file.iter_batches(_ROWS, row_groups=list(self.groups), columns=names):
                first, last = max(self.start - row, 0), min(self.stop - row, batch.num_rows)
                row += batch.num_rows
                if first < last:
                    own = batch.slice(first, last - first)
                    parts = [_bytes(own.column(column.name), column, self.file) for column in self.columns]
                    yield np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class ParquetTable:
    """The rows of several files, in the order of the files.

    Args:
        files: the paths or addresses of the files, and the rows in each of their row groups.
        columns: the columns that are read.
    """

    files: tuple[tuple[str, tuple[int, ...]], ...]
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, files: Sequence[str], names: Sequence[str]) -> ParquetTable:
        """Returns the table of some files and columns.

        Raises:
            UsageError: a file cannot be read, or a column cannot be read as numbers.
        """
        metadata = [_footer(name) for name in files]
        sizes = tuple(
            (name, tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups)))
            for name, footer in zip(files, metadata, strict=True)
        )
        found: dict[tuple[Column, ...], str] = {}
        for name, footer in zip(files, metadata, strict=True):
            if footer.num_rows:
                found.setdefault(tuple(_column(footer, column, name) for column in names), name)
        if not found:
            raise UsageError("the Parquet files have no rows", code="no-rows", hint="check the folder or the pattern")
        if len(found) > 1:
            (first, one), (second, other), *_ = found.items()
            a, b = next((a, b) for a, b in zip(first, second, strict=True) if a != b)
            name = a.name
            if a.dtype == b.dtype and a.width is not None and b.width is not None:
                raise _ragged(name, f"{one} and {other}")
            raise UsageError(
                f"the column {name!r} differs between {one} and {other}",
                code="unequal-columns",
                hint="write the files with one schema, and lists of one length",
            )
        return cls(sizes, next(iter(found)))

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(sum(groups) for _, groups in self.files)

    def part(self, index: int, count: int) -> list[Piece]:
        """Returns one of `count` equal parts of the rows: each row is in one, and their sizes differ by 1 at most."""
        first, last = index * self.rows // count, (index + 1) * self.rows // count
        pieces, before = [], 0
        for name, sizes in self.files:
            starts = np.cumsum([before, *sizes]).tolist()
            groups = [
                number for number in range(len(sizes)) if max(starts[number], first) < min(starts[number + 1], last)
            ]
            if groups:
                start, end = starts[groups[0]], starts[groups[-1] + 1]
                pieces.append(
                    Piece(name, tuple(groups), max(first, start) - start, min(last, end) - start, self.columns)
                )
            before = starts[-1]
        return pieces


def pyarrow_parquet() -> Any:
    """Returns the module `pyarrow.parquet`.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet  # noqa: PLC0415 an extra
    except ModuleNotFoundError:
        raise UsageError(
            "pyarrow is not installed, and Parquet files need it",
            code="no-pyarrow",
            hint="pip install 'tfdist-cli[parquet]', or use .csv or .npy files",
        ) from None
    return parquet


def _footer(name: str) -> Any:
    at = location(name)
    try:
        state = at.stat() if isinstance(at, Path) else None
        return _read_footer(name, state and (state.st_size, state.st_mtime_ns))
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror or error}", code="unreadable-file", hint="check its path"
        ) from error
    except ValueError as error:  # ArrowInvalid is one
        raise UsageError(
            f"{name} is no Parquet file: {error}", code="invalid-parquet", hint="name Parquet files only"
        ) from error


@lru_cache(maxsize=10_000)
def _read_footer(name: str, state: Any) -> Any:  # noqa: ARG001 a file that has changed is read again
    with open_location(location(name)) as opened, pyarrow_parquet().ParquetFile(opened) as file:
        return file.metadata


def _column(footer: Any, name: str, file: str) -> Column:
    schema = footer.schema.to_arrow_schema()
    if name not in schema.names:
        raise UsageError(
            f"{file} has no column {name!r}: it has {', '.join(schema.names)}",
            code="no-such-column",
            hint="check the names of the columns",
        )
    kind = schema.field(name).type
    found = getattr(kind, "storage_type", kind)  # of an extension, such as the arrays of Ray
    item = getattr(found, "value_type", None) if "list" in str(found).partition("<")[0] else None
    dtype = _NUMBERS.get(str(item or found))
    if str(found) == "null":
        raise _empty_values(name, file)
    if str(item) == "null":
        raise UsageError(
            f"all lists in the column {name!r} are empty in {file}",
            code="empty-lists",
            hint="pad them to one length, or leave these rows or the column out",
        )
    if "VariableShapedTensor" in str(kind):  # an extension of Ray
        raise _ragged(name, file)
    if dtype is None:
        raise UsageError(
            f"the column {name!r} has values of the type {kind}, and {_PLAIN}",
            code="column-not-numbers",
            hint="convert it before: texts to class numbers, decimals and times to float",
        )
    chunks = _chunks(footer, schema, name)
    if any(chunk.statistics and chunk.statistics.has_null_count and chunk.statistics.null_count for chunk in chunks):
        raise _empty_values(name, file)
    width = None
    if item is not None:
        width, rest = divmod(sum(chunk.num_values for chunk in chunks), footer.num_rows)
        if rest:
            raise _ragged(name, file)
    return Column(name, dtype, width)


def _chunks(footer: Any, schema: Any, name: str) -> list[Any]:
    """Returns the parts of a column in the row groups.

    Its place tells which they are. Their paths do not: `a.b` is a part of the column `a`, or another column's name.
    """
    at = schema.names.index(name)
    first = sum(_leaves(field.type) for field in list(schema)[:at])
    own = range(first, first + _leaves(schema.field(at).type))
    return [footer.row_group(group).column(each) for group in range(footer.num_row_groups) for each in own]


def _leaves(kind: Any) -> int:
    """Returns the number of columns in a file that have the values of an Arrow type."""
    kind = getattr(kind, "storage_type", kind)
    text = str(kind).partition("<")[0]
    if text == "map":
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if "list" in text:
        return _leaves(kind.value_type)
    if text == "struct":
        return sum(_leaves(kind.field(each).type) for each in range(kind.num_fields))
    return 1


def _bytes(values: Any, column: Column, file: str) -> np.ndarray:
    """Returns an Arrow array as a matrix of bytes.

    Raises:
        ValueError: it has empty values, or lists of different lengths.
    """
    rows = len(values)
    values = getattr(values, "storage", values)
    if column.width is not None:
        if values.null_count:
            raise ValueError(_empty_values(column.name, file).message)
        lengths = values.value_lengths().unique().to_pylist()
        if lengths != [column.width]:
            raise ValueError(_ragged(column.name, file).message)
        values = values.flatten()
    if values.null_count:
        raise ValueError(_empty_values(column.name, file).message)
    numbers = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    return numbers.view(np.uint8).reshape(rows, column.bytes)


def _empty_values(name: str, file: str) -> UsageError:
    return UsageError(
        f"the column {name!r} has empty values (null) or empty lists in {file}",
        code="empty-values",
        hint="fill them in, pad lists to one length, or leave these rows out",
    )


def _ragged(name: str, file: str) -> UsageError:
    return UsageError(
        f"the lists in the column {name!r} have different lengths in {file}",
        code="unequal-lists",
        hint="pad them to one length",
    )
