"""What a training is fed: each worker's part of the data, in a seeded order that a resumed run goes on with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.arrays import as_arrays
from tfdist_cli.train.tf_compat.data import allow_many_batches, calls_python, recreated_on
from tfdist_cli.train.tf_compat.eager_context import remote_caller

AUTO_SHUFFLE = 10_000
"""Examples in the shuffle buffer when none is named and the data is larger."""

_KERAS_BATCH = 32

_UNKNOWN = (tf.data.UNKNOWN_CARDINALITY, tf.data.INFINITE_CARDINALITY)


@dataclass(frozen=True)
class Shard:
    """One worker's part of the data.

    Args:
        index: which part, from 0.
        count: into how many parts the data is divided; 1 when each worker sees all of it.
        worker: the number of the worker that reads it; tells orders apart when `count` is 1.
        step: the steps this worker is taken to have done already, in an earlier launch: its data goes on after them.
    """

    index: int = 0
    count: int = 1
    worker: int = 0
    step: int = 0


ALL = Shard()
"""The data as a whole."""

DatasetFunction = Callable[[Shard], tf.data.Dataset]
"""A shard → its batches, `(x,)`, `(x, y)` or `(x, y, sample_weight)` each."""


_IDENTITY = {"index", "count", "worker"}
"""The attributes that say which shard it is."""


class _WatchedShard(Shard):
    """A shard that knows whether somebody has looked which one it is."""

    looked_at = False

    def __getattribute__(self, name: str) -> Any:
        if name in _IDENTITY:
            object.__setattr__(self, "looked_at", True)
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Sharded:
    """A user's dataset function, which has to return the shard that it is asked for.

    One that never looks which shard that is gives every worker the same data: each example is then trained on once by
    each worker. That is known for sure, and without reading the data. It is not of pipelines that call Python code,
    which may look at the shard when they are read.

    Args:
        function: the user's.
        name: what it is called in messages.
    """

    function: Callable[[Shard], tf.data.Dataset]
    name: str

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Calls it.

        Raises:
            TrainingError: it does not look at the shard, and there are several.
        """
        if shard.count == 1:
            return self.function(shard)
        watched = _WatchedShard(shard.index, shard.count, shard.worker, shard.step)
        dataset = self.function(watched)
        if watched.looked_at or not isinstance(dataset, tf.data.Dataset) or calls_python(dataset):
            return dataset
        raise TrainingError(
            f"{self.name} does not look at the shard, so each of {shard.count} workers would be given all of the data",
            hint="return dataset.shard(shard.count, shard.index); where each worker is meant to train on all of it, "
            "write train: {share: copy} in a recipe, or tfdist.fit(..., share='copy')",
        )


@dataclass(frozen=True)
class Pipeline:
    """Turns a recipe's examples into batches.

    Args:
        batch_size: examples in a batch.
        shuffle: examples in the shuffle buffer, 0 for none, None for all of them up to `AUTO_SHUFFLE`.
        seed: of the order; each worker and each pass over the data has its own.
        repeat: whether the data starts again when it ends.
    """

    batch_size: int
    shuffle: int | None = None
    seed: int = 0
    repeat: bool = True

    def buffer(self, examples: tf.data.Dataset) -> int:
        """Examples in the shuffle buffer; 0 keeps their order."""
        if self.shuffle is not None:
            return self.shuffle
        return min(cardinality(examples) or AUTO_SHUFFLE, AUTO_SHUFFLE)

    def batches(self, examples: tf.data.Dataset, shard: Shard) -> tf.data.Dataset:
        """Shuffles, repeats and batches the shard's examples, from the batch that follows `shard.step`.

        Every pass has its own order, drawn from (seed, worker, pass). Batches are full: one may hold the end of one
        pass and the beginning of the next. So that a resumed worker goes on where it was, whole passes are counted
        off, and only what was read of the last one is read again; where nobody knows how long a pass is, all of it.

        Raises:
            TrainingError: the shard has no examples, which would have to start again for ever.
        """
        size = cardinality(examples)
        if size == 0 and self.repeat:
            raise _nothing_for(shard)
        buffer = self.buffer(examples)
        first_pass, skipped = divmod(shard.step * self.batch_size, size) if size else (0, shard.step * self.batch_size)

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            ordered = _in_order_of(number, examples, buffer, self.seed, shard.worker) if buffer else examples
            return _until_empty(ordered) if self.repeat and size is None else ordered

        passes = tf.data.Dataset.range(first_pass, tf.int64.max if self.repeat and size else 1)
        ordered = passes.flat_map(one_pass).skip(skipped)
        return ordered.batch(self.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _until_empty(examples: tf.data.Dataset) -> tf.data.Dataset:
    """Pass after pass, each in an order of its own, up to the first that shows nothing.

    Joined with a shuffle, as TensorFlow would have it, a repetition never ends.
    """
    options = tf.data.Options()
    options.experimental_optimization.shuffle_and_repeat_fusion = False
    return examples.with_options(options).repeat()


def _in_order_of(number: tf.Tensor, examples: tf.data.Dataset, buffer: int, seed: int, worker: int) -> tf.data.Dataset:
    """The examples in the order of one pass. It is called in a function of tf.data's, which has a seed of its own.

    The order depends on nothing but these: not on a seed that the user's program has set for itself.
    """
    tf.random.set_seed(seed + 1)
    return examples.shuffle(buffer, seed=_order(worker, number))


def _order(worker: int, number: Any) -> Any:
    """The seed of a worker's pass."""
    return 1_000_003 * worker + number


@dataclass(frozen=True)
class ArrayBatches:
    """A shard of arrays → its batches, the last one of a pass as large as what is left.

    Args:
        arrays: one or several, in tuples and dicts, with the same number of examples.
        batch_size: examples in a batch.
        shuffle: whether each worker and each pass over the data has its own order.
    """

    arrays: Any
    batch_size: int
    shuffle: bool

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """One pass, from the batch that follows `shard.step`."""
        own = self._own(shard)
        size = cardinality(own)
        ordered = own.shuffle(size, seed=_order(shard.worker, 0)) if self.shuffle and size else own
        return _from(shard.step, ordered.batch(self.batch_size))

    def endless(self, shard: Shard) -> tf.data.Dataset:
        """One pass after the other; what was read in an earlier launch is left out, whole passes without reading them.

        Raises:
            TrainingError: the shard has no examples.
        """
        own = self._own(shard)
        size = cardinality(own)
        if not size:
            raise _nothing_for(shard)
        first_pass, skipped = divmod(shard.step, -(-size // self.batch_size))

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            ordered = _in_order_of(number, own, size, 0, shard.worker) if self.shuffle else own
            return ordered.batch(self.batch_size)

        return _from(skipped, tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass))

    def _own(self, shard: Shard) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.arrays).shard(shard.count, shard.index)


def _from(step: int, batches: tf.data.Dataset) -> tf.data.Dataset:
    """The batches that follow so many; `skip` counts, which data workers cannot, even where it leaves out nothing."""
    return batches.skip(step) if step else batches


def cardinality(dataset: tf.data.Dataset) -> int | None:
    """The number of elements; None when it is unknown or infinite."""
    static = tf.get_static_value(dataset.cardinality())
    return None if static is None or static in _UNKNOWN else int(static)


def as_dataset_function(data: Any, batch_size: int | None = None, *, shuffle: bool = False) -> DatasetFunction:
    """Reads what Keras users pass to `fit`.

    Args:
        data: a function of a `Shard` that returns a dataset of batches; a dataset of batches, whose every
            `shard.count`-th batch is a shard; or arrays `(x, y)` or `(x, y, sample_weight)`.
        batch_size: examples in a batch made of arrays; None for 32, as in Keras.
        shuffle: whether arrays are shuffled, anew for each pass.

    Raises:
        TrainingError: it is none of these, a function that does not take a shard, or arrays that `as_arrays` refuses.
    """
    if isinstance(data, tf.data.Dataset):
        return _parts_of(data)
    if callable(data):
        _check_takes_shard(data)
        return Sharded(data, "the dataset function")
    if isinstance(data, (tuple, list)) and 1 <= len(data) <= 3:
        return ArrayBatches(as_arrays(data), batch_size or _KERAS_BATCH, shuffle)
    raise TrainingError(
        f"{type(data).__name__} is no training data",
        hint="pass a function of a tfdist.Shard that returns a tf.data.Dataset of batches, a dataset, or (x, y) arrays",
    )


def _check_takes_shard(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in one does not say what it takes
        return
    try:
        signature.bind(Shard())
    except TypeError as error:
        raise TrainingError(
            f"the dataset function cannot be called with a tfdist.Shard: {error}",
            hint="let it take one argument, the part of the data that it is to return: lambda shard: ...",
        ) from error


def _parts_of(data: tf.data.Dataset) -> DatasetFunction:
    """The parts of a dataset that is there already, on whichever task asks for one.

    A dataset is a value of the process that made it. A worker of parameter servers is sent its graph, from the chief.
    """

    def part(shard: Shard) -> tf.data.Dataset:
        here = _other_task_asks()
        whole = data if here is None else _sent(data, here)
        return _from(shard.step, whole.shard(shard.count, shard.index))

    return part


def _other_task_asks() -> str | None:
    """This task's device, if what is made now is made on another task; None if it is made here."""
    caller = remote_caller()
    return caller and f"/job:{caller[0]}/replica:0/task:{caller[1]}/device:CPU:0"


def _sent(data: tf.data.Dataset, here: str) -> tf.data.Dataset:
    """The same pipeline on the task that asks for it.

    Args:
        data: a dataset of this task.
        here: this task's device.

    Raises:
        TrainingError: it calls Python code, which stays here.
    """
    if calls_python(data):
        raise TrainingError(
            "the dataset calls Python code (py_function, numpy_function, from_generator), which no worker can be sent",
            hint="pass a function that makes the dataset, and its shard: "
            "tfdist.fit(model, lambda shard: make_dataset().shard(shard.count, shard.index))",
        )
    return recreated_on(data, here)


def repeated(function: DatasetFunction) -> DatasetFunction:
    """The same data without an end, from the batch that follows `shard.step`; `function` need not heed that.

    The function that it returns raises a `TrainingError` for a shard that has no batches.
    """
    if isinstance(function, ArrayBatches):
        return function.endless

    def endless(shard: Shard) -> tf.data.Dataset:
        once = function(replace(shard, step=0))
        size = cardinality(once)
        if size == 0:
            raise _nothing_for(shard)
        return once.repeat().skip(shard.step % size if size else shard.step)

    return endless


def _nothing_for(shard: Shard) -> TrainingError:
    return TrainingError(
        f"there is no data for worker:{shard.worker} (part {shard.index} of {shard.count})",
        hint="use fewer workers, smaller batches or more data, or divide it by examples rather than by files",
    )


def next_batch(iterator: Any) -> Any:
    """The next batch, within a function of TensorFlow's that takes any number of them.

    TensorFlow takes more than 32 in one function for a loop that somebody forgot to compile, and refuses them.
    """
    allow_many_batches(iterator)
    return next(iterator)


def ended_early(whose: str) -> TrainingError:
    """What is raised when there is no next batch.

    Args:
        whose: data it is.
    """
    return TrainingError(
        f"{whose} ended before the training did",
        code="data-ended-early",
        hint="let it start again (train.repeat: true in a recipe, .repeat() on a dataset), or train fewer steps; "
        "if it does start again, there is nothing in it",
    )


def checked(function: DatasetFunction, shard: Shard) -> tf.data.Dataset:
    """Calls a dataset function and checks what it returns.

    Raises:
        TrainingError: it is no dataset, or its elements are no `(x[, y[, sample_weight]])`.
    """
    dataset = function(shard)
    if not isinstance(dataset, tf.data.Dataset):
        raise TrainingError(
            f"the dataset function returned {type(dataset).__name__}, not a tf.data.Dataset",
            hint="return a tf.data.Dataset of (x, y) or (x, y, sample_weight)",
        )
    spec = dataset.element_spec
    if isinstance(spec, tuple) and len(spec) > 3:
        raise TrainingError(f"the data's elements have {len(spec)} parts", hint="yield (x, y) or (x, y, sample_weight)")
    return _without_tuning(dataset)


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Keeps tf.data from tuning itself while it runs, unless the dataset's options ask for it.

    What is left to `tf.data.AUTOTUNE` is chosen once. The thread that tunes sleeps for ever longer times, and the end
    of an iterator now and then waits for it, for seconds.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def check_ends(function: DatasetFunction, shard: Shard = ALL) -> None:
    """Data without an end would be scored for ever.

    Raises:
        TrainingError: the data repeats.
    """
    if tf.get_static_value(checked(function, shard).cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise TrainingError(
            "the data to score has no end",
            hint="leave .repeat() out of it, or say how many batches to score: evaluate: {steps: ...} in a recipe, "
            "tfdist.Validation(data, steps=...), tfdist.evaluate(model, data, steps=...)",
        )


def steps_in(function: DatasetFunction, shards: list[Shard], *, synchronous: bool) -> int | None:
    """Batches that show the data once: all shards' together, or the shortest shard's when workers step together.

    Returns:
        None when a shard's length is unknown or infinite.
    """
    lengths = []
    for shard in shards:
        length = cardinality(checked(function, replace(shard, step=0)))
        if length is None:
            return None
        lengths.append(length)
    return min(lengths) if synchronous else sum(lengths)
