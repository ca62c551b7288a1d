"""Reads the examples of a file, or of a recipe's split, part by part."""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.storage.parquet import pyarrow_parquet
from tfdist_cli.storage.remote_file import open_location
from tfdist_cli.task.prediction.conversion import converted

Arrays = Mapping[str, Any]
"""The columns or arrays of some examples by name; see `Examples`."""
Part = tuple[int, Arrays]
"""The number of a part, and its examples."""
ONLY = "x"
"""The name of the array of a .npy file, which has none."""
_NUMBERED = re.compile(r"_\d+$")


class Examples(dict[str, Any]):
    """The columns or arrays of a part by name.

    Args:
        arrays: the columns or arrays.
        path: their file.
        first: the number of the part's first example in the file, from 0.
        lines: the line of each example, if the file has lines.
    """

    def __init__(self, arrays: Arrays, path: Location, first: int, lines: Sequence[int] = ()) -> None:
        super().__init__(arrays)
        self._path, self._first, self._lines = path, first, lines

    def place(self, row: int) -> str:
        """Returns where an example of this part is, for a message."""
        return f"{self._path}:{self._lines[row]}" if self._lines else f"{self._path}, example {self._first + row + 1}"


@dataclass(frozen=True)
class Reading:
    """How examples are read.

    Args:
        part_size: examples in a part.
        wanted: whether a part is to be read.
        columns: the columns or arrays to read; () for all.
    """

    part_size: int
    wanted: Callable[[int], bool]
    columns: tuple[str, ...] = ()

    def bounds(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yields the parts that are wanted of so many examples: number, first and last."""
        for part in range(-(-rows // self.part_size)):
            if self.wanted(part):
                yield part, part * self.part_size, min(rows, (part + 1) * self.part_size)


def read(path: Location, reading: Reading, ended: Callable[[int], None]) -> Iterator[Part]:
    """Yields the wanted parts of a file in order.

    Args:
        path: a .npy, .npz, .csv or .parquet file, also in a storage service.
        reading: how it is read.
        ended: called with the number of examples, as soon as it is known.

    Raises:
        UsageError: the file does not exist, is of another kind, or lacks a column or a value.
    """
    suffix = Path(path.name).suffix
    if suffix not in READERS:
        raise UsageError(
            f"{path} is none of the files that can be read: {', '.join(READERS)}",
            code="unknown-data-file",
            hint="convert it; or name a split of the recipe's dataset(params, split, shard), which reads anything",
        )
    try:
        file = open_location(path)
    except (FileNotFoundError, IsADirectoryError):
        raise UsageError(
            f"there is no file {path}", code="no-data-file", hint="give --data a file or a split"
        ) from None
    except PermissionError as error:
        raise _unreadable(path, error) from error
    return _read(file, path, READERS[suffix](file, path, reading, ended))


def _read(file: BinaryIO, path: Location, parts: Iterator[Part]) -> Iterator[Part]:
    with file:
        try:
            yield from parts  # what fails in the code that takes a part does not come back here
        except (EOFError, ValueError, TypeError, csv.Error, zipfile.BadZipFile, zlib.error) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Location, error: Exception) -> UsageError:
    """The error of a file that is damaged, or not what its suffix says."""
    reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error).partition("\n")[0]
    return UsageError(
        f"{path} cannot be read: {reason}",
        code="unreadable-data-file",
        hint="it has to be what its suffix says: CSV as UTF-8 text with a line of names, .npy and .npz without Python "
        "objects, or Parquet",
    )


def _chosen(names: Sequence[str], reading: Reading, path: Location) -> list[str]:
    missing = [name for name in reading.columns if name not in names]
    if missing:
        raise UsageError(
            f"{path} has no column {missing[0]!r}: it has {', '.join(names)}",
            code="no-such-column",
            hint="name the inputs of the model with --columns",
        )
    return list(reading.columns or names)


def _npy(file: BinaryIO, path: Location, reading: Reading, ended: Callable[[int], None]) -> Iterator[Part]:
    if isinstance(path, Path):
        array = np.load(path, mmap_mode="r")
        rows, slices = len(array), array.__getitem__
    else:
        rows, slices = _remote_array(file, path)
    ended(rows)
    for part, first, last in reading.bounds(rows):
        yield part, Examples({ONLY: np.asarray(slices(slice(first, last)))}, path, first)


def _remote_array(file: BinaryIO, path: Location) -> tuple[int, Callable[[slice], np.ndarray]]:
    """Returns the length of an array, and a function that reads a slice of it.

    Format: NumPy enhancement proposal 1, "A simple file format for NumPy arrays".
    """
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    shape, column_major, dtype = headers[version](file)
    if column_major or dtype.hasobject or not shape:
        raise UsageError(
            f"{path} is {'column-major' if column_major else f'an array of {dtype}, shape {shape}'}",
            code="unknown-data-file",
            hint="save it with numpy.save(file, numpy.ascontiguousarray(array)), or download it first",
        )
    start, row = file.tell(), int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize

    def read(rows: slice) -> np.ndarray:
        file.seek(start + rows.start * row)
        content = file.read((rows.stop - rows.start) * row)
        return np.frombuffer(content, dtype).reshape(-1, *shape[1:])

    return shape[0], read


def _npz(file: BinaryIO, path: Location, reading: Reading, ended: Callable[[int], None]) -> Iterator[Part]:
    with np.load(file) as found:
        arrays = {name: found[name] for name in _chosen(found.files, reading, path)}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            f"the arrays of {path} have different lengths: {lengths}",
            code="array-lengths-differ",
            hint="give each input the same number of examples, or choose inputs with --columns",
        )
    rows = next(iter(lengths.values()), 0)
    ended(rows)
    for part, first, last in reading.bounds(rows):
        yield part, Examples({name: array[first:last] for name, array in arrays.items()}, path, first)


def _csv(file: BinaryIO, path: Location, reading: Reading, ended: Callable[[int], None]) -> Iterator[Part]:
    with TextIOWrapper(file, "utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        header = next(reader, [])
        names = _chosen(header, reading, path)
        places = [header.index(name) for name in names]
        rows = _rows(reader, path, max(places, default=-1) + 1, len(header))
        part = count = size = 0
        while part == 0 or size == reading.part_size:
            if reading.wanted(part):
                found = list(islice(rows, reading.part_size))
                size = len(found)
                if size:
                    columns = (np.asarray([row[place] for _, row in found]) for place in places)
                    lines = [line for line, _ in found]
                    yield part, Examples(dict(zip(names, columns, strict=True)), path, count, lines)
            else:
                last = deque(enumerate(islice(rows, reading.part_size), 1), maxlen=1)
                size = last[0][0] if last else 0
            count, part = count + size, part + 1
        ended(count)


def _rows(reader: Any, path: Location, needed: int, width: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows that a `csv.reader` reads, each with its line.

    Args:
        reader: the `csv.reader`.
        path: its file.
        needed: how many values of a row are needed.
        width: how many it should have.

    Raises:
        UsageError: a row has fewer values than needed. Empty lines at the end are no rows.
    """
    for row in reader:
        line = reader.line_num
        if len(row) < needed:
            if not row and not any(reader):
                return
            raise UsageError(
                f"{path}:{line}: the row has {len(row)} of {width} values",
                code="row-incomplete",
                hint="complete the row, or remove it",
            )
        yield line, row


def _parquet(file: BinaryIO, path: Location, reading: Reading, ended: Callable[[int], None]) -> Iterator[Part]:
    parquet = pyarrow_parquet()
    with parquet.ParquetFile(file) as opened:
        names = _chosen(opened.schema_arrow.names, reading, path)
        sizes = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        ended(int(starts[-1]))
        for part, first, last in reading.bounds(int(starts[-1])):
            groups = [number for number in range(len(sizes)) if starts[number] < last and starts[number + 1] > first]
            table = opened.read_row_groups(groups, columns=names)
            table = table.slice(first - int(starts[groups[0]]), last - first)
            yield part, Examples({name: _column(table.column(name)) for name in names}, path, first)


def _column(column: Any) -> np.ndarray:
    """Returns the values of a Parquet column; of lists of the same length, a matrix."""
    values = column.to_numpy(zero_copy_only=False)
    return np.stack(values) if values.dtype == object and len(values) and isinstance(values[0], np.ndarray) else values


READERS: Mapping[str, Callable[[BinaryIO, Location, Reading, Callable[[int], None]], Iterator[Part]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""The readers by the suffix of the file."""


def bound(arrays: Arrays, specs: Mapping[str, tuple[tuple[int | None, ...], Any]]) -> dict[str, np.ndarray]:
    """Returns the arrays of a model's inputs.

    A model with one input takes all columns in order. Several inputs take those of their names: `age`, or `age_0`,
    `age_1` and so on.

    Args:
        arrays: the columns.
        specs: the shape of an example and the NumPy type of each input, by name.

    Raises:
        UsageError: an input has no columns, they have another shape, or a value is none of the input's type.
    """
    bound_arrays = {}
    for name, (shape, dtype) in specs.items():
        own = arrays if len(specs) == 1 else _of_input(name, arrays)
        if not own:
            raise UsageError(
                f"the data has no column for the model's input {name!r}: it has {', '.join(arrays)}",
                code="input-without-column",
                hint=f"the inputs are {', '.join(specs)}; name the columns after them",
            )
        place = arrays.place if isinstance(arrays, Examples) else "example {}".format
        try:
            columns = [converted(np.asarray(each), dtype, column=key, place=place) for key, each in own.items()]
            typed = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
            fixed = [size for size in shape if size is not None]
            bound_arrays[name] = typed.reshape(len(typed), *shape) if len(fixed) == len(shape) else typed
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"the model's input {name!r} takes examples of shape {list(shape)}, and the data has another: {error}",
                code="input-shape-differs",
                hint="choose the columns that are inputs, in their order, with --columns",
            ) from error
    return bound_arrays


def _of_input(name: str, arrays: Arrays) -> Arrays:
    if name in arrays:
        return {name: arrays[name]}
    return {key: array for key, array in arrays.items() if _NUMBERED.sub("", key) == name and key != name}
