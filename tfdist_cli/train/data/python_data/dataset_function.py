"""The dataset function of Python data, which only this process can read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import keras
import tensorflow as tf

from tfdist_cli.train.data.length import cardinality, is_endless
from tfdist_cli.train.data.python_data.buffered import BufferedSource
from tfdist_cli.train.data.python_data.reading import as_dataset
from tfdist_cli.train.data.python_data.sources import GeneratorSource, PassesSource, PyDatasetSource, Source
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.tf_compat.data import is_loader, python_batches


@dataclass(frozen=True)
class PythonData:
    """A dataset function of data that only this process can read.

    Args:
        source: the data.
        repeat: whether it starts again when it ends.
    """

    source: Source
    repeat: bool = False
    _position: list[int] = field(default_factory=lambda: [0])

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Returns the share of a worker, from its next batch on."""
        source, first = self.source, self._position[0] + shard.step * shard.count
        read = partial(source.read, first, shard.index, shard.count, repeat=self.repeat)
        return as_dataset(read, source.spec, self._cardinality(first, shard))

    def _cardinality(self, first: int, shard: Shard) -> int | None:
        if self.source.endless or (self.repeat and self.source.length):
            return int(tf.data.INFINITE_CARDINALITY)
        if self.source.length is None:
            return None
        return len(range(first + shard.index, self.source.length, shard.count))

    def repeated(self) -> PythonData:
        """Returns the data, repeated without end; a generator is read once."""
        return replace(self, repeat=self.source.repeats)

    def buffered(self) -> PythonData:
        """Returns the data, read once for all shares: several workers read it at the same time, from one process.

        They divide each pass, whose order may be another each time, and a `PyDataset` is not asked by several at once.
        """
        return self if isinstance(self.source, BufferedSource) else replace(self, source=BufferedSource(self.source))

    def skipping(self) -> PythonData:
        """Returns the data, read once for all shares. A worker that is behind skips what is let go of."""
        data = self.buffered()
        cast("BufferedSource", data.source).skips = True
        return data

    @property
    def has_unknown_end(self) -> bool:
        """See `ReadAhead.has_unknown_end`."""
        return self.source.length is None and not self.source.endless

    def ahead(self, batches: int, least: int, most: int) -> int:
        """See `ReadAhead.ahead`; the data has to be buffered."""
        source = cast("BufferedSource", self.source)
        return source.ahead(self._position[0] + batches, least, most, repeat=self.repeat)

    def advance(self, batches: int) -> None:
        """Lets a generator begin after some more batches from now on; other data begins anew."""
        if not self.source.repeats:
            self._position[0] += batches
            self.forget(self._position[0])

    def forget(self, before: int) -> None:
        """Lets go of batches that no training step reads again; see `Consumed`."""
        self.source.forget(before)

    def close(self) -> None:
        """Ends the reading of buffered data."""
        if isinstance(self.source, BufferedSource):
            self.source.close()


def advance(data: Any, batches: int | None) -> None:
    """Lets data that is read once begin after some batches that were read."""
    if isinstance(data, PythonData) and batches:
        data.advance(batches)


def source_of(data: Any, class_weight: Any, *, shuffle: bool) -> Source:
    """Returns the source of a generator, a `PyDataset` or a DataLoader.

    Raises:
        ValueError: Keras does not take the data.
    """
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data, class_weight, shuffle=shuffle)
    if is_loader(data):
        return PassesSource(*python_batches(data, class_weight))
    return BufferedSource(GeneratorSource(data, class_weight))


def read_by_chief(dataset: tf.data.Dataset) -> PythonData:
    """Returns a dataset as data that only this process reads."""
    endless = is_endless(lambda _: dataset, Shard())
    return PythonData(PassesSource(dataset.element_spec, cardinality(dataset), dataset.__iter__, endless=endless))
