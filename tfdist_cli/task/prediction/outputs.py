"""Writes predictions: a file for each part, and at the end one file of all parts, in order."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.errors import UsageError
from tfdist_cli.storage.parquet import pyarrow_parquet

Columns = Mapping[str, np.ndarray]
"""The predictions of some examples by the name of the output."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Args:
        write: writes predictions to a new file.
        join: writes one file of the files of all parts.
    """

    write: Callable[[Path, Columns], None]
    join: Callable[[Path, Sequence[Path]], None]


def format_of(path: Path) -> Format:
    """Returns the format of an output file by its suffix.

    Raises:
        UsageError: there is none with this suffix, or pyarrow is missing.
    """
    if path.suffix not in FORMATS:
        raise UsageError(
            f"--output must end in {', '.join(FORMATS)}, got {path.name}",
            code="unknown-output-format",
            hint="predictions.parquet keeps shapes and types; predictions.csv can be read anywhere",
        )
    if path.suffix == ".parquet":
        pyarrow_parquet()
    return FORMATS[path.suffix]


def seal(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that it exists only when it is complete and on the disk."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _flat(columns: Columns) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a column for each number of an example: `name`, or `name_0`, `name_1` and so on."""
    for name, array in columns.items():
        rows = array.reshape(len(array), int(np.prod(array.shape[1:])))
        if rows.shape[1] == 1:
            yield name, rows[:, 0]
        else:
            yield from ((f"{name}_{number}", rows[:, number]) for number in range(rows.shape[1]))


def _write_csv(path: Path, columns: Columns) -> None:
    flat = dict(_flat(columns))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(flat)
        writer.writerows(zip(*(_texts(array) for array in flat.values()), strict=True))


def _texts(array: np.ndarray) -> list[Any]:
    values = array.astype(np.float32) if array.dtype.kind not in "fiubOSU" else array
    return [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in values]


def _join_csv(path: Path, parts: Sequence[Path]) -> None:
    with path.open("wb") as out:
        for number, part in enumerate(parts):
            with part.open("rb") as file:
                header = file.readline()
                if number == 0:
                    out.write(header)
                shutil.copyfileobj(file, out)


def _write_parquet(path: Path, columns: Columns) -> None:
    import pyarrow  # noqa: PLC0415 an extra

    fields = {}
    for name, array in columns.items():
        flat = array.reshape(-1)
        values = pyarrow.array(list(flat) if array.dtype == object else flat)
        size = int(np.prod(array.shape[1:]))
        fields[name] = values if size == 1 else pyarrow.FixedSizeListArray.from_arrays(values, size)
    pyarrow_parquet().write_table(pyarrow.table(fields), path)


def _join_parquet(path: Path, parts: Sequence[Path]) -> None:
    parquet = pyarrow_parquet()
    with parquet.ParquetWriter(path, parquet.read_schema(parts[0])) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part))


def _write_npy(path: Path, columns: Columns) -> None:
    if len(columns) > 1:
        raise UsageError(
            f"the model has {len(columns)} outputs, and a .npy file has one",
            code="several-outputs",
            hint="write a .parquet or .csv file",
        )
    (array,) = columns.values()
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def _join_npy(path: Path, parts: Sequence[Path]) -> None:
    arrays = [np.load(part, mmap_mode="r") for part in parts]
    first = arrays[0]
    shape = (sum(len(array) for array in arrays), *first.shape[1:])
    with path.open("wb") as out:
        header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, header)
        for array in arrays:
            out.write(np.ascontiguousarray(array).data)


FORMATS: Mapping[str, Format] = {
    ".parquet": Format(_write_parquet, _join_parquet),
    ".csv": Format(_write_csv, _join_csv),
    ".npy": Format(_write_npy, _join_npy),
}
"""The formats by the suffix of the file."""
