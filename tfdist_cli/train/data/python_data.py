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
from functools import partial
from typing import Any, Protocol, cast

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.pipeline import (
    DatasetFunction,
    Shard,
    cardinality,
    checked,
    is_endless,
    pass_seed,
    until_empty,
)
from tfdist_cli.train.tf_compat.data import is_loader, python_batches

_PREFETCHED = 4
"""Batches that are read ahead."""
_READ_AHEAD_BYTES = 256 * 2**20
"""The most bytes of batches that are read to find the end of the data."""
_GRACE_SECONDS = 2.0
"""How long the exit of the process waits for a batch that is being made."""


class Source(Protocol):
    """Python code that yields batches.

    Attributes:
        spec: the `tf.TypeSpec`s of a batch.
        repeats: whether it can be read more than once.
    """

    spec: Any
    repeats: bool

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
        read = partial(source.read, first, shard.index, shard.count, repeat=self.repeat)
        return _as_dataset(read, source.spec, self._cardinality(first, shard))

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
        """Returns the data, read once for all shares: several workers read it at the same time, from one process."""
        return self if isinstance(self.source, BufferedSource) else replace(self, source=BufferedSource(self.source))

    def read_at_once(self) -> PythonData:
        """Returns the data for readers that divide one pass: all need one order, which may be another each time."""
        return self.buffered() if isinstance(self.source, PassesSource) else self

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


class ReadAhead(Protocol):
    """A dataset function of data whose length is found out when it ends: the training reads ahead of its steps."""

    repeat: bool
    """Whether the data starts again when it ends."""

    @property
    def has_unknown_end(self) -> bool:
        """Whether the data ends, and nobody knows where."""

    def ahead(self, batches: int, least: int, most: int) -> int:
        """Reads batches up to the end of the pass, and returns how many there are.

        Args:
            batches: the batches that all workers together have consumed.
            least: how many to read, whatever their size is.
            most: the most batches to read.
        """


@dataclass(frozen=True)
class OwnShard:
    """A dataset function that reads ahead: this process's own shard of data whose length is unknown.

    Args:
        function: one pass over the data.
        readers: how many processes read a shard each.
        repeat: whether the data starts again when it ends. Each pass makes the iterator anew, as Keras does.
        by_pass: whether who reads it asks for each pass, see `next_pass`.
    """

    function: DatasetFunction
    readers: int = 1
    repeat: bool = True
    by_pass: bool = False
    _opened: list[BufferedSource] = field(default_factory=list)
    _passes: list[_Passes] = field(default_factory=list)

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Returns the batches of a shard; `ahead` reads those of the shard that was opened last."""
        dataset = checked(self.function, replace(shard, step=0))
        source = self._opened[0] if self._opened and self._opened[0].name == shard_name(shard) else None
        if source is None:
            source = BufferedSource(PassesSource(dataset.element_spec, None, dataset.__iter__), shard_name(shard))
            self._opened[:], self._passes[:] = [source], [_Passes(dataset, shard.step)]
        read = partial(source.read, shard.step, 0, 1, repeat=self.repeat, to_end=self.by_pass and not shard.step)
        return _as_dataset(read, source.spec)

    def next_pass(self, batches: int) -> tf.data.Dataset | None:
        """Returns the data from the beginning of a pass on; None if the reading of now continues there.

        The pass before it may have ended for all workers, with the shortest shard, while this shard has batches left.
        They are read first. If there are none, TensorFlow reads the passes itself from now on.

        Args:
            batches: the batches that all workers together have consumed.
        """
        step, source, passes = batches // self.readers, self._opened[0], self._passes[0]
        if not self.by_pass or step == passes.begin:
            return None
        passes.begin = step
        if passes.alone or source.ends_at(step, repeat=self.repeat):
            passes.alone = True
            source.close()
            return passes.dataset
        return _as_dataset(partial(source.read, step, 0, 1, repeat=self.repeat), source.spec)

    @property
    def has_unknown_end(self) -> bool:
        """See `ReadAhead.has_unknown_end`."""
        return True

    def ahead(self, batches: int, least: int, most: int) -> int:
        """See `ReadAhead.ahead`."""
        readers = self.readers
        own = self._opened[0].ahead(batches // readers, least // readers, most // readers, repeat=self.repeat)
        return own * readers

    def forget(self, before: int) -> None:
        """Lets go of the batches of steps that are done."""
        for source in self._opened:
            source.forget(before // self.readers)

    def close(self) -> None:
        """Ends the reading; what TensorFlow does beside it ends, too."""
        for source in self._opened:
            source.close()
        self._opened.clear()


class _Passes:
    """The passes over a shard.

    Args:
        once: a pass.
        begin: the number of the batch that the first one is read from.

    Attributes:
        dataset: all passes. A pass that has become shorter continues with the next one.
        begin: the number of the batch that the current one is read from.
        alone: whether they are read without Python.
    """

    def __init__(self, once: tf.data.Dataset, begin: int) -> None:
        self.dataset = until_empty(once)
        self.begin, self.alone = begin, False


def reads_ahead(data: Any) -> bool:
    """Whether data is a `ReadAhead` whose end is not known."""
    return bool(getattr(data, "has_unknown_end", False))


def shard_name(shard: Shard) -> str:
    """Returns a name of a shard of a worker."""
    return f"{shard.index} of {shard.count} for {shard.worker}"


def _as_dataset(read: Callable[[], Iterator[Any]], spec: Any, length: int | None = None) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_generator(_Reading(read), output_signature=spec)
    if length is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
    return dataset.prefetch(_PREFETCHED)


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

    repeats = True

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


class PassesSource:
    """Data that can be iterated over anew: a DataLoader, of which all tasks get the same batches, or a dataset.

    Args:
        spec: the `tf.TypeSpec`s of a batch.
        length: the number of batches in a pass; None if it is unknown.
        one_pass: starts a pass.
        endless: whether a pass never ends.
    """

    repeats = True

    def __init__(
        self, spec: Any, length: int | None, one_pass: Callable[[], Iterator[Any]], *, endless: bool = False
    ) -> None:
        self.spec, self.length, self._one_pass, self.endless = spec, length, one_pass, endless

    def read(self, first: int, index: int, count: int, *, repeat: bool) -> Iterator[Any]:
        """See `Source.read`. Complete passes before the first batch are not read if their length is known."""
        skipped = first % self.length if self.length else first
        passes = itertools.chain.from_iterable(self._one_pass() for _ in itertools.count() if repeat)
        yield from itertools.islice(passes if repeat else self._one_pass(), skipped + index, None, count)

    def forget(self, before: int) -> None:
        """Does nothing: it is read anew."""


class GeneratorSource:
    """A generator, which is read once.

    Args:
        generator: the generator.
        class_weight: refused by Keras.
    """

    length: int | None = None
    endless = repeats = False

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

    Data of unknown length is read pass by pass, and the end of a pass is noted.

    Args:
        source: the source.
        name: what is read.
    """

    def __init__(self, source: Source, name: str = "") -> None:
        self.spec, self.length, self.endless, self.repeats = source.spec, source.length, source.endless, source.repeats
        self.source, self.name = source, name
        self._batches: Iterator[Any] | None = None
        self._kept: dict[int, Any] = {}
        self._batch_bytes = 0
        self._first = self._read = self._forgotten = 0
        self._opened = self._restarts = self._closed = False
        self._pass_begin = 0
        self._pass_end: int | None = None
        self._lock = threading.Lock()

    def read(self, first: int, index: int, count: int, *, repeat: bool, to_end: bool = False) -> Iterator[Any]:
        """See `Source.read`.

        Args:
            first: see there.
            index: see there.
            count: see there.
            repeat: see there.
            to_end: whether the batches end with the pass, although another one may follow.

        Raises:
            TrainingError: a batch was let go of.
        """
        with self._lock:
            self._open(first, repeat=repeat)
        for number in itertools.count(first + index, count):
            found = self._batch(number, to_end=to_end)
            if found is None:
                return
            yield found[0]

    def ahead(self, first: int, least: int, most: int, *, repeat: bool) -> int:
        """Reads batches from `first` on, up to the end of a pass; returns how many there are.

        Args:
            first: the number of the first one.
            least: the number to read whatever their size is.
            most: the most batches to read.
            repeat: whether another pass follows a pass.
        """
        with self._lock:
            self._open(first, repeat=repeat)
            while self._pass_end is None and self._read < first + most:
                full = self._batch_bytes * len(self._kept) >= _READ_AHEAD_BYTES
                if (full and self._read >= first + least) or not self._draw():
                    break
            end = self._read if self._pass_end is None else self._pass_end
            return max(0, min(first + most, end) - first)

    def ends_at(self, number: int, *, repeat: bool) -> bool:
        """Whether the first pass that was read to its end ended before the batch of a number."""
        self.ahead(number, 1, 1, repeat=repeat)
        return self._pass_end == number

    def forget(self, before: int) -> None:
        """See `Source.forget`."""
        with self._lock:
            for number in range(self._forgotten, min(before, self._read)):
                self._kept.pop(number, None)  # none are kept after `close`
            self._forgotten = max(self._forgotten, min(before, self._read))

    def close(self) -> None:
        """Ends the reading; whoever still reads ahead finds no more batches."""
        with self._lock:
            self._closed = True
            self._batches = None
            self._kept.clear()

    def _open(self, first: int, *, repeat: bool) -> None:
        """Begins to read at a batch, unless it has begun."""
        if self._opened:
            return
        self._opened, self._first, self._forgotten = True, first, first
        self._restarts = repeat and self.repeats and self.length is None and not self.endless
        if not self._restarts:
            self._batches = self.source.read(first, 0, 1, repeat=repeat)
            self._read = first
        while self._read < first and self._draw():
            pass

    def _draw(self) -> bool:
        """Reads the next batch, or notes that the pass has ended. Returns whether more may follow.

        The next pass begins only when its first batch is needed. After the first complete pass its length is known, and
        complete passes before the first batch are not read.
        """
        if self._batches is None:
            self._batches = self.source.read(0, 0, 1, repeat=False)
        found = next(self._batches, None)
        if found is not None:
            if self._read >= self._forgotten:
                self._kept[self._read] = found
                self._batch_bytes = self._batch_bytes or _bytes_of(found)
            self._read += 1
            return True
        if self._pass_end is None and self._read >= self._first:
            self._pass_end = self._read
        length = self._read - self._pass_begin
        if not self._restarts or not length:
            return False
        self._read += max(0, self._first - self._read) // length * length
        self._pass_begin, self._batches = self._read, None
        return True

    def _batch(self, number: int, *, to_end: bool) -> tuple[Any] | None:
        """Returns a batch; None after the last one."""

        def is_over() -> bool:
            return self._closed or (to_end and self._pass_end is not None and number >= self._pass_end)

        with self._lock:
            while not is_over() and self._read <= number:
                if not self._draw():
                    return None
            if is_over():
                return None
            if number < self._forgotten:
                raise TrainingError(
                    f"batch {number} of a generator is to be read again, and it is gone",
                    code="generator-read-again",
                    hint="pass a keras.utils.PyDataset, which can be read again",
                )
            return (self._kept[number],)


def _bytes_of(batch: Any) -> int:
    """Returns the bytes of a batch's arrays."""
    tensors = tf.nest.flatten(batch, expand_composites=True)
    return sum(int(getattr(each.numpy() if tf.is_tensor(each) else each, "nbytes", 0)) for each in tensors)


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
        return PassesSource(*python_batches(data, class_weight))
    return BufferedSource(GeneratorSource(data, class_weight))


def read_by_chief(dataset: tf.data.Dataset) -> PythonData:
    """Returns a dataset as data that only this process reads."""
    endless = is_endless(lambda _: dataset, Shard())
    return PythonData(PassesSource(dataset.element_spec, cardinality(dataset), dataset.__iter__, endless=endless))


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
