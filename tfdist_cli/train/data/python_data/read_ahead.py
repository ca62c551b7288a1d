"""Data whose end is found while it is trained on: it is read ahead of the steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from tfdist_cli.train.data.pipeline import until_empty
from tfdist_cli.train.data.python_data.buffered import BufferedSource
from tfdist_cli.train.data.python_data.reading import as_dataset
from tfdist_cli.train.data.python_data.sources import PassesSource
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked


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
        return as_dataset(read, source.spec)

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
        return as_dataset(partial(source.read, step, 0, 1, repeat=self.repeat), source.spec)

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
