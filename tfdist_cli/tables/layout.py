"""The files of pushed tables: what a training writes after its checkpoints, and a server reads.

    TABLES/00000041.json          the push 41: a base with all rows, or a delta of the push before it
           00000041-000.npz …     its rows, in the order in which they are applied

The `.json` is written last. A push without it is not complete. Files never change afterwards.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

FORMAT = 1
_MANIFEST = re.compile(r"([0-9]{8})\.json")
_OF_PUSH = re.compile(r"([0-9]{8})(\.json|-[0-9]{3,}\.npz)")


class DamagedPush(Exception):
    """A push is incomplete, or was changed; the message says which."""


@dataclass(frozen=True)
class TableShape:
    """A table.

    Args:
        name: its name, that of the layer.
        rows: how many rows it has; a multiple of 1024.
        width: the numbers in a row.
        dtype: NumPy's name of their type.
    """

    name: str
    rows: int
    width: int
    dtype: str


@dataclass(frozen=True)
class RowsFile:
    """A file with rows of a table.

    Args:
        name: its name.
        table: the number of the table in `Manifest.tables`.
        rows: how many rows it has.
        bytes: its size.
        sha256: its SHA-256.
    """

    name: str
    table: int
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a push consists of, written as its `.json`.

    Args:
        sequence: the number of the push.
        base: the number of the base that its rows are applied to; its own if it is one.
        step: the global step of the checkpoint.
        tables: the tables.
        files: the files, in the order in which they are applied.
        checkpoint: the digests of the parts of the checkpoint: those of the next push begin with these if it is a
            delta.
        previous: the seal of the push before; empty for the first one.
        format: the version of this layout.
        seal: the SHA-256 of the other values.
    """

    sequence: int
    base: int
    step: int
    tables: list[TableShape]
    files: list[RowsFile]
    checkpoint: list[str] = field(default_factory=list)
    previous: str = ""
    format: int = FORMAT
    seal: str = ""

    @property
    def kind(self) -> Literal["base", "delta"]:
        """What it is."""
        return "base" if self.base == self.sequence else "delta"

    def sealed(self) -> Manifest:
        """Returns it with its seal."""
        return replace(self, seal=_seal(asdict(self)))

    def packed(self) -> bytes:
        """Returns the content of its file."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def parsed(cls, content: bytes, where: str) -> Manifest:
        """Returns the manifest in a file.

        Args:
            content: the file's content.
            where: its path, for messages.

        Raises:
            DamagedPush: it was changed, or is of a later format.
        """
        try:
            values = json.loads(content)
            version, seal, own = values["format"], values["seal"], _seal(values)
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedPush(f"{where} cannot be read: {error}") from error
        if version != FORMAT:
            raise DamagedPush(f"{where} has format {version}, which this version of tfdist cannot read")
        if seal != own:
            raise DamagedPush(f"{where} has been changed since it was written")
        tables = [TableShape(**each) for each in values["tables"]]
        return cls(**{**values, "tables": tables, "files": [RowsFile(**each) for each in values["files"]]})


def _seal(values: dict[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Rows:
    """Some rows of a table, the content of a file.

    Args:
        rows: their numbers in the table, int32, shape (n,).
        ids: the id of each, int64, shape (n,); 0 where there is none.
        present: whether an id has the row, bool, shape (n,). The row 0 belongs to all other ids.
        values: the rows, shape (n, width).
        strings: the string of each id, uint8, as `tables.strings` describes; zeros where there is none. None if
            they are not kept.
    """

    rows: np.ndarray
    ids: np.ndarray
    present: np.ndarray
    values: np.ndarray
    strings: np.ndarray | None = None

    def of(self, some: np.ndarray) -> Rows:
        """Returns some of them, by a mask."""
        strings = None if self.strings is None else self.strings[some]
        return Rows(self.rows[some], self.ids[some], self.present[some], self.values[some], strings)

    def packed(self) -> bytes:
        """Returns the content of the file, in NumPy's format `npz`."""
        file = io.BytesIO()
        strings: dict[str, Any] = {} if self.strings is None else {"strings": self.strings}
        np.savez(file, rows=self.rows, ids=self.ids, present=self.present, values=self.values, **strings)
        return file.getvalue()

    @classmethod
    def parsed(cls, content: bytes) -> Rows:
        """Returns the rows in a file."""
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            strings = stored.get("strings")
            return cls(stored["rows"], stored["ids"], stored["present"], stored["values"], strings)


def manifest_name(sequence: int) -> str:
    """Returns the name of the file of a push."""
    return f"{sequence:08d}.json"


def rows_name(sequence: int, number: int) -> str:
    """Returns the name of a file with rows of a push."""
    return f"{sequence:08d}-{number:03d}.npz"


def sequences(names: Iterable[str]) -> list[int]:
    """Returns the numbers of the complete pushes among the files of a folder, ascending."""
    return sorted(int(found[1]) for name in names if (found := _MANIFEST.fullmatch(name)))


def sequence_of(name: str) -> int | None:
    """Returns the number of the push that a file belongs to; None if it is another file."""
    found = _OF_PUSH.fullmatch(name)
    return int(found[1]) if found else None


def digest(content: bytes) -> str:
    """Returns the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()
