"""A reader of pushed tables, for servers: it needs NumPy, and fsspec for a storage service, but no TensorFlow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import checked_location
from tfdist_cli.storage.local import open_folder
from tfdist_cli.tables.hashing import WAYS, as_ids, candidates, hashed, unhashed
from tfdist_cli.tables.layout import (
    DamagedPush,
    Manifest,
    Rows,
    TableShape,
    digest,
    manifest_name,
    sequences,
)
from tfdist_cli.tables.strings import decoded

_TRIES = 3
"""How often the pushes are listed anew because files of an old base have been removed meanwhile."""


class PushedTable:
    """A table as a training has pushed it last.

    Args:
        shape: its name and size.
        lock: held while rows are looked up or changed.
    """

    def __init__(self, shape: TableShape, lock: threading.Lock) -> None:
        self.shape = shape
        self._lock = lock
        self._keys = np.zeros((shape.rows // WAYS, WAYS), np.int64)
        self._values = np.zeros((shape.rows, shape.width), shape.dtype)
        self._strings: np.ndarray | None = None

    def lookup(self, ids: Any) -> np.ndarray:
        """Returns the vectors of ids; ids without a row have the default row, as in the model's prediction.

        Args:
            ids: integers or strings, of any shape.

        Returns:
            The vectors, shape (*ids.shape, width).
        """
        given = as_ids(ids)
        with self._lock:
            found: np.ndarray = self._values[self._rows(given)]
        return found

    def has(self, ids: Any) -> np.ndarray:
        """Returns which ids have a row, bool, in the shape of the ids."""
        given = as_ids(ids)
        with self._lock:
            found: np.ndarray = self._rows(given) != 0
        return found

    def vocabulary(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that have rows, and their vectors.

        Returns:
            The ids, shape (n,), int64; or `str` if the layer keeps strings, see `DynamicEmbedding.vocabulary`. And the
            vectors, shape (n, width).
        """
        with self._lock:
            keys = self._keys.reshape(-1)
            rows = np.flatnonzero(keys)
            ids, vectors = unhashed(keys[rows]), self._values[rows]
            strings = None if self._strings is None else self._strings[rows]
        return ids if strings is None else decoded(strings), vectors

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        """The row of each id; 0 if it has none."""
        keys = hashed(ids.reshape(-1))
        buckets = candidates(keys, self.shape.rows)
        same = (self._keys[buckets] == keys[:, None, None]).reshape(-1, 2 * WAYS)
        place = same.argmax(axis=1)
        rows = np.take_along_axis(buckets, place[:, None] // WAYS, axis=1)[:, 0] * WAYS + place % WAYS
        return np.where(same.any(axis=1) & (keys != 0), rows, 0).reshape(ids.shape)

    def apply(self, own: Rows) -> None:
        """Replaces rows. The caller holds the lock, unless nobody else has the table yet."""
        self._keys.reshape(-1)[own.rows] = np.where(own.present, hashed(own.ids), 0)
        self._values[own.rows] = own.values
        if own.strings is not None:
            if self._strings is None:
                self._strings = np.zeros((self.shape.rows, own.strings.shape[1]), np.uint8)
            self._strings[own.rows] = own.strings


@dataclass(frozen=True)
class _State:
    """What has been read.

    Args:
        manifest: the last push.
        tables: the tables by their names.
    """

    manifest: Manifest
    tables: dict[str, PushedTable]


class TableReader:
    """The tables that a training pushes, for lookups while it goes on.

    `refresh` reads what is new. Threads may look up rows meanwhile: each push is applied at once. If a file is damaged,
    nothing of its push is applied.

    Args:
        at: the folder, on this machine or in a storage service: `checkpoint.push_tables` of the recipe.

    Raises:
        UsageError: there is no complete push, it is damaged, or the storage service cannot be used.
    """

    def __init__(self, at: str | Path) -> None:
        self._at = checked_location(at)
        self._folder = open_folder(self._at)
        self._lock = threading.Lock()
        self._state: _State | None = None
        self.refresh()
        _ = self._current

    def __getitem__(self, name: str) -> PushedTable:
        """Returns a table by the name of its layer. It is another object after a base has been read.

        Raises:
            KeyError: there is no such table.
        """
        return self._current.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current.tables)

    @property
    def sequence(self) -> int:
        """The number of the last push that was read."""
        return self._current.manifest.sequence

    @property
    def step(self) -> int:
        """The global step of the checkpoint whose rows it has."""
        return self._current.manifest.step

    @property
    def _current(self) -> _State:
        if self._state is None:
            raise UsageError(
                f"no tables have been pushed to {self._at} yet",
                code="no-pushed-tables",
                hint="set checkpoint.push_tables in the recipe, and wait for its first checkpoint",
            )
        return self._state

    def refresh(self) -> bool:
        """Reads all pushes since the last call. Returns whether there were any.

        Raises:
            UsageError: one is damaged; the rows stay as they were before it.
        """
        for tried in range(_TRIES):
            try:
                return self._refreshed()
            except FileNotFoundError as error:  # a newer base has replaced it
                if tried == _TRIES - 1:
                    raise self._damaged(f"{error.filename or error} is missing in {self._at}") from error
            except DamagedPush as error:
                raise self._damaged(str(error)) from error
        raise AssertionError("unreachable")

    def _refreshed(self) -> bool:
        found = sequences(self._folder.sizes())
        before = self._state.manifest.sequence if self._state else 0
        if not found or found[-1] <= before:
            return False
        newest = self._manifest(found[-1])
        if self._state is None or newest.base > before:
            self._read_base(newest.base)
        while self._current.manifest.sequence < newest.sequence:
            self._apply_next()
        return True

    def _read_base(self, sequence: int) -> None:
        manifest = self._manifest(sequence)
        tables = [PushedTable(shape, self._lock) for shape in manifest.tables]
        for table, own in self._files(manifest):
            tables[table].apply(own)
        self._state = _State(manifest, {each.shape.name: each for each in tables})

    def _apply_next(self) -> None:
        state = self._current
        manifest = self._manifest(state.manifest.sequence + 1)
        if manifest.previous != state.manifest.seal:
            raise DamagedPush(f"{self._at}/{manifest_name(manifest.sequence)} does not follow the push before it")
        files = list(self._files(manifest))  # all of them before the first one is applied
        tables = [state.tables[shape.name] for shape in manifest.tables]
        with self._lock:
            for table, own in files:
                tables[table].apply(own)
            self._state = _State(manifest, state.tables)

    def _manifest(self, sequence: int) -> Manifest:
        name = manifest_name(sequence)
        return Manifest.parsed(self._folder.read(name), f"{self._at}/{name}")

    def _files(self, manifest: Manifest) -> Iterator[tuple[int, Rows]]:
        """Yields the rows of a push with the numbers of their tables.

        Raises:
            DamagedPush: a file was changed.
        """
        for file in manifest.files:
            content = self._folder.read(file.name)
            if len(content) != file.bytes or digest(content) != file.sha256:
                raise DamagedPush(f"{self._at}/{file.name} has been changed since it was written")
            yield file.table, Rows.parsed(content)

    def _damaged(self, reason: str) -> UsageError:
        return UsageError(
            reason,
            code="pushed-tables-damaged",
            hint="a later base is read without it; the training pushes one with each full checkpoint",
        )
