"""Data that Python code of this process yields: generators, `PyDataset` and DataLoaders.

Only the process with the object can read it. With parameter servers this is the chief, whose next batch goes to the
worker that asks first. Mirrored workers all run the program: each reads its own share of the batches.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.pipeline import Shard, pass_seed
from tfdist_cli.train.tf_compat.data import is_loader, python_batches

_PREFETCHED = 4
"""Batches that are read ahead."""
_GRACE_SECONDS = 2.0
"""How long the exit of the process waits for a batch that is being made."""


class Source(Protocol):
    """Python code that yields batches.

    Attributes:
        spec: the `tf.TypeSpec`s of a batch.
    """

    spec: Any

    @property
    def length(self) -> int | None:
        """The number of batches in a pass; None if it is unknown."""

    @property
    def endless(self) -> bool:
        """Whether a pass never ends."""

    def read(self, first: int, index: int, count: int, *, repeat: bool) -> Iterator[Any]:
        """Yields a share of the batches.

        Args:
            first: the number of the first batch of all shares.
            index: the share.
            count: the number of shares: a share is every `count`-th batch.
            repeat: whether another pass follows a pass.
        """

    def forget(self, before: int) -> None:
        """Lets go of the batches before a number: they are not read again."""


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
        reading = _Reading(lambda: source.read(first, shard.index, shard.count, repeat=self.repeat))
        dataset = tf.data.Dataset.from_generator(reading, output_signature=source.spec)
        known = self._cardinality(first, shard)
        if known is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(known))
        return dataset.prefetch(_PREFETCHED)

    def _cardinality(self, first: int, shard: Shard) -> int | None:
        if self.source.endless or (self.repeat and self.source.length):
            return int(tf.data.INFINITE_CARDINALITY)
        if self.source.length is None:
            return None
        return len(range(first + shard.index, self.source.length, shard.count))

    def repeated(self) -> PythonData:
        """Returns the data, repeated without end; that of unknown length is read once."""
        return replace(self, repeat=self.source.length is not None)

    def buffered(self) -> PythonData:
        """Returns the data, read once for all shares: several workers read it at the same time, from one process."""
        return self if isinstance(self.source, BufferedSource) else replace(self, source=BufferedSource(self.source))

    def advance(self, batches: int) -> None:
        """Lets a generator begin after some more batches from now on; other data begins anew."""
        if isinstance(self.source, BufferedSource):
            self._position[0] += batches
            self.forget(self._position[0])

    def forget(self, before: int) -> None:
        """Lets go of batches that no training step reads again; see `Consumed`."""
        self.source.forget(before)


def advance(data: Any, batches: int | None) -> None:
    """Lets data that is read once begin after some batches that were read."""
    if isinstance(data, PythonData) and batches:
        data.advance(batches)


class PyDatasetSource:
    """A `keras.utils.PyDataset`.

    Args:
        dataset: the dataset.
        class_weight: the weight of each class.
        shuffle: whether each pass has another order of batches, the same on all tasks.
    """

    def __init__(self, dataset: keras.utils.PyDataset, class_weight: Any, *, shuffle: bool) -> None:
        self._dataset, self._class_weight, self._shuffle = dataset, class_weight, shuffle
        self.spec, self.length, _ = python_batches(dataset, class_weight)
        self.endless = self.length is None

    def read(self, first: int, index: int, count: int, *, repeat: bool) -> Iterator[Any]:
        """See `Source.read`. Passes before the first batch are not read; the dataset is told of their ends.

        Like Keras, it also tells the dataset of an end before the first pass.
        """
        self._dataset.on_epoch_end()
        if not self.length:
            yield from self._part(range(first + index, 2**62, count)) if self.endless else ()
            return
        for _ in range(first // self.length):
            self._skip_pass()
        begins = first // self.length * self.length
        while True:
            ends = begins + self.length
            start = max(first, begins)
            own = [each - begins for each in range(start, ends) if (each - first) % count == index]
            yield from self._part(self._order(begins // self.length)[own])
            if not repeat:
                return
            begins = ends

    def _order(self, number: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.length or 0)
        return np.random.default_rng(pass_seed(0, number)).permutation(self.length or 0)

    def _skip_pass(self) -> None:
        self._dataset.on_epoch_begin()
        self._dataset.on_epoch_end()

    def _part(self, order: Any) -> Iterator[Any]:
        part = _Part(self._dataset, order)
        if not len(order):
            self._skip_pass()
            return
        yield from python_batches(part, self._class_weight)[2]()

    def forget(self, before: int) -> None:
        """Does nothing: every batch can be made again."""


class _Part(keras.utils.PyDataset):
    """Some batches of a dataset.

    Args:
        whole: the dataset.
        order: the numbers of the batches.
    """

    def __init__(self, whole: keras.utils.PyDataset, order: Any) -> None:
        super().__init__(whole.workers, whole.use_multiprocessing, whole.max_queue_size)
        self._whole, self._order = whole, order

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None for a dataset without end."""
        return None if isinstance(self._order, range) else len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._whole[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        """Tells the dataset."""
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the dataset."""
        self._whole.on_epoch_end()


class LoaderSource:
    """A DataLoader, which can be iterated over anew: all tasks have to get the same batches in the same order."""

    endless = False

    def __init__(self, loader: Any, class_weight: Any) -> None:
        self.spec, self.length, self._one_pass = python_batches(loader, class_weight)

    def read(self, first: int, index: int, count: int, *, repeat: bool) -> Iterator[Any]:
        """See `Source.read`. Complete passes before the first batch are not read."""
        skipped = first % self.length if self.length else first
        passes = itertools.chain.from_iterable(self._one_pass() for _ in itertools.count() if repeat)
        yield from itertools.islice(passes if repeat else self._one_pass(), skipped + index, None, count)

    def forget(self, before: int) -> None:
        """Does nothing: the loader is read anew."""


class GeneratorSource:
    """A generator, which is read once.

    Args:
        generator: the generator.
        class_weight: refused by Keras.
    """

    length: int | None = None
    endless = False

    def __init__(self, generator: Any, class_weight: Any) -> None:
        self.spec, _, batches = python_batches(generator, class_weight)
        self._batches = batches()

    def read(self, first: int, index: int, count: int, *, repeat: bool) -> Iterator[Any]:  # noqa: ARG002 it cannot
        """See `Source.read`."""
        return itertools.islice(self._batches, first + index, None, count)

    def forget(self, before: int) -> None:
        """Does nothing: it keeps nothing."""


class BufferedSource:
    """A source that is read once for all shares. What was read is kept until it is known not to be read again.

    Args:
        source: the source.
    """

    def __init__(self, source: Source) -> None:
        self.spec, self.length, self.endless = source.spec, source.length, source.endless
        self.source = source
        self._batches: Iterator[Any] | None = None
        self._kept: dict[int, Any] = {}
        self._read = self._forgotten = 0
        self._lock = threading.Lock()

    def read(self, first: int, index: int, count: int, *, repeat: bool) -> Iterator[Any]:
        """See `Source.read`.

        Raises:
            TrainingError: a batch was let go of.
        """
        with self._lock:
            if self._batches is None:
                self._batches = self.source.read(first, 0, 1, repeat=repeat)
                self._read = self._forgotten = first
        for number in itertools.count(first + index, count):
            found = self._batch(self._batches, number)
            if found is None:
                return
            yield found[0]

    def forget(self, before: int) -> None:
        """See `Source.forget`."""
        with self._lock:
            for number in range(self._forgotten, min(before, self._read)):
                del self._kept[number]
            self._forgotten = max(self._forgotten, min(before, self._read))

    def _batch(self, batches: Iterator[Any], number: int) -> tuple[Any] | None:
        """Returns a batch; None after the last one."""
        with self._lock:
            while self._read <= number:
                found = next(batches, None)
                if found is None:
                    return None
                self._kept[self._read] = found
                self._read += 1
            if number < self._forgotten:
                raise TrainingError(
                    f"batch {number} of a generator is to be read again, and it is gone",
                    code="generator-read-again",
                    hint="pass a keras.utils.PyDataset, which can be read again",
                )
            return (self._kept[number],)


def is_python_data(data: Any) -> bool:
    """Whether data is a generator, a `PyDataset` or a DataLoader."""
    return isinstance(data, (keras.utils.PyDataset, types.GeneratorType)) or is_loader(data)


def source_of(data: Any, class_weight: Any, *, shuffle: bool) -> Source:
    """Returns the source of a generator, a `PyDataset` or a DataLoader.

    Raises:
        ValueError: Keras does not take the data.
    """
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data, class_weight, shuffle=shuffle)
    if is_loader(data):
        return LoaderSource(data, class_weight)
    return BufferedSource(GeneratorSource(data, class_weight))


_open: weakref.WeakSet[_Reading] = weakref.WeakSet()
"""The functions that TensorFlow may be reading batches from."""


class _Reading:
    """Opens the batches, and yields them until the process exits.

    Args:
        read: yields the batches.
    """

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._ended = False

    def __call__(self) -> Iterator[Any]:
        batches = self._read()
        _open.add(self)
        while True:
            with self._lock:
                batch = next(batches, self) if not self._ended else self
            if batch is self:
                return
            yield batch

    def end(self) -> None:
        """Ends the data, after the batch that is being made."""
        self._ended = True
        if self._lock.acquire(timeout=_GRACE_SECONDS):
            self._lock.release()


@atexit.register
def _end_all() -> None:
    """No thread of TensorFlow may call Python when the interpreter ends."""
    for reading in list(_open):
        reading.end()
