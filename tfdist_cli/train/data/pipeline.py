"""Input pipelines: batches of a shard, in a seeded order that a resumed run continues."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.shard import DatasetFunction, Shard, empty_shard
from tfdist_cli.train.tf_compat.data import allow_many_batches

AUTO_SHUFFLE = 10_000
"""The largest shuffle buffer that is used by default, in examples."""


@dataclass(frozen=True)
class Pipeline:
    """Makes batches of a recipe's examples.

    Args:
        batch_size: examples in a batch.
        shuffle: examples in the shuffle buffer; 0 does not shuffle; None uses all examples, at most `AUTO_SHUFFLE`.
        seed: the seed of the order. Each worker and each pass over the data has its own order.
        repeat: whether the data starts again when it ends.
    """

    batch_size: int
    shuffle: int | None = None
    seed: int = 0
    repeat: bool = True

    def buffer(self, examples: tf.data.Dataset) -> int:
        """Returns the size of the shuffle buffer in examples; 0 keeps their order."""
        if self.shuffle is not None:
            return self.shuffle
        return min(cardinality(examples) or AUTO_SHUFFLE, AUTO_SHUFFLE)

    def batches(self, examples: tf.data.Dataset, shard: Shard) -> tf.data.Dataset:
        """Shuffles, repeats and batches the shard's examples, starting after batch number `shard.step`.

        Every pass has its own order, drawn from (seed, worker, pass). All batches are full: a batch may contain the end
        of one pass and the start of the next. A resumed worker skips complete passes by arithmetic, and reads again
        what it had read of the last one. If the length of a pass is unknown, it reads everything again.

        Raises:
            TrainingError: the shard has no examples, and `repeat` is set.
        """
        size = cardinality(examples)
        if size == 0 and self.repeat:
            raise empty_shard(shard)
        buffer = self.buffer(examples)
        first_pass, skipped = divmod(shard.step * self.batch_size, size) if size else (0, shard.step * self.batch_size)

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            ordered = _shuffled_pass(number, examples, buffer, self.seed, shard.worker) if buffer else examples
            return until_empty(ordered) if self.repeat and size is None else ordered

        passes = tf.data.Dataset.range(first_pass, tf.int64.max if self.repeat and size else 1)
        ordered = passes.flat_map(one_pass).skip(skipped)
        return ordered.batch(self.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def until_empty(examples: tf.data.Dataset) -> tf.data.Dataset:
    """Repeats the elements, each pass in another order, until a pass has no elements.

    TensorFlow fuses a repetition with a shuffle before it. A fused repetition of an empty dataset never ends.
    """
    options = tf.data.Options()
    options.experimental_optimization.shuffle_and_repeat_fusion = False
    return examples.with_options(options).repeat()


def _shuffled_pass(
    number: tf.Tensor, examples: tf.data.Dataset, buffer: int, seed: int, worker: int
) -> tf.data.Dataset:
    """Shuffles the examples for one pass. Called in a function of `tf.data`, whose graph has its own global seed.

    The order depends on the arguments only, not on a seed that the user's program has set.
    """
    tf.random.set_seed(seed + 1)
    return examples.shuffle(buffer, seed=pass_seed(worker, number))


def pass_seed(worker: int, number: Any) -> Any:
    """Returns the operation seed of a worker's pass."""
    return 1_000_003 * worker + number


@dataclass(frozen=True)
class ArrayBatches:
    """A dataset function of arrays. The last batch of a pass has the remaining examples.

    Args:
        arrays: one or several arrays, in tuples and dicts, with the same number of examples.
        batch_size: examples in a batch.
        shuffle: whether each worker reads each pass in another order.
    """

    arrays: Any
    batch_size: int
    shuffle: bool

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Returns one pass, starting after batch number `shard.step`."""
        own = self._examples(shard)
        size = cardinality(own)
        ordered = own.shuffle(size, seed=pass_seed(shard.worker, 0)) if self.shuffle and size else own
        return skip_batches(ordered.batch(self.batch_size), shard.step)

    def repeated(self) -> DatasetFunction:
        """Returns a dataset function that repeats the arrays, see `repeated`."""
        return self._all_passes

    def _all_passes(self, shard: Shard) -> tf.data.Dataset:
        """Returns all passes, starting after batch number `shard.step`; complete passes are skipped by arithmetic.

        Raises:
            TrainingError: the shard has no examples.
        """
        own = self._examples(shard)
        size = cardinality(own)
        if not size:
            raise empty_shard(shard)
        first_pass, skipped = divmod(shard.step, -(-size // self.batch_size))

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            ordered = _shuffled_pass(number, own, size, 0, shard.worker) if self.shuffle else own
            return ordered.batch(self.batch_size)

        return skip_batches(tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass), skipped)

    def _examples(self, shard: Shard) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.arrays).shard(shard.count, shard.index)


def skip_batches(batches: tf.data.Dataset, step: int) -> tf.data.Dataset:
    """Skips `step` batches. For 0 it adds no `skip`, which data workers reject, since it counts elements."""
    return batches.skip(step) if step else batches


def repeated(function: DatasetFunction) -> DatasetFunction:
    """Returns a dataset function that repeats the data without end, starting after batch number `shard.step`.

    A function with a method `repeated` does so itself. `function` may ignore `shard.step`. The returned function raises
    a `TrainingError` for a shard without batches.
    """
    repeats_itself = getattr(function, "repeated", None)
    if repeats_itself:
        return repeats_itself()

    def endless(shard: Shard) -> tf.data.Dataset:
        once = function(replace(shard, step=0))
        size = cardinality(once)
        if size == 0:
            raise empty_shard(shard)
        return once.repeat().skip(shard.step % size if size else shard.step)

    return endless


@dataclass
class Consumed:
    """The batches of the data that were trained on.

    Args:
        data: the data.
        batches: how many of them all workers together have consumed.
    """

    data: DatasetFunction | None = None
    batches: int = 0

    def count(self, batches: int) -> None:
        """Counts batches of steps that are done, and lets `forget` of the data know: no step reads them again."""
        self.batches += batches
        forget = getattr(self.data, "forget", None)
        if forget:
            forget(self.batches)

    def next_pass(self) -> tf.data.Dataset | None:
        """Returns the data from the beginning of a pass on; None if the dataset of now continues there."""
        following = getattr(self.data, "next_pass", None)
        return following(self.batches) if following else None

    def close(self) -> None:
        """Ends the reading of data that is read ahead."""
        close = getattr(self.data, "close", None)
        if close:
            close()


def next_batch(iterator: Any) -> Any:
    """Returns the next batch, in a `tf.function` that may read any number of batches."""
    allow_many_batches(iterator)
    return next(iterator)


def ended_early(whose: str) -> TrainingError:
    """Returns the error for data that ends before the training does.

    Args:
        whose: names the data, such as "worker:0's data".
    """
    return TrainingError(
        f"{whose} ended before the training did",
        code="data-ended-early",
        hint="repeat it (train.repeat: true in a recipe, .repeat() on a dataset), or train fewer steps; "
        "if it is repeated already, it is empty",
    )
