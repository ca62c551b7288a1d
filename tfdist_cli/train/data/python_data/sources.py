"""Sources of batches: a `PyDataset`, a DataLoader or dataset that is read pass by pass, and a generator."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np

from tfdist_cli.train.data.pipeline import pass_seed
from tfdist_cli.train.tf_compat.data import is_loader, python_batches


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


def is_python_data(data: Any) -> bool:
    """Whether data is a generator, a `PyDataset` or a DataLoader."""
    return isinstance(data, (keras.utils.PyDataset, types.GeneratorType)) or is_loader(data)
