"""Input pipelines: each worker's shard of the data, in a seeded order that a resumed run continues."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.arrays import as_arrays
from tfdist_cli.train.data.same_draws import SameDraws
from tfdist_cli.train.tf_compat.data import (
    allow_many_batches,
    calls_python,
    draws_an_order,
    draws_in_functions,
    is_sharded_after_a_draw,
    recreated_on,
    replace_older_datasets,
)
from tfdist_cli.train.tf_compat.eager_context import remote_caller
from tfdist_cli.train.tf_compat.op_errors import shortened

AUTO_SHUFFLE = 10_000
"""The largest shuffle buffer that is used by default, in examples."""

KERAS_BATCH = 32
"""Examples in a batch of arrays by default, as in Keras."""

_UNKNOWN = (tf.data.UNKNOWN_CARDINALITY, tf.data.INFINITE_CARDINALITY)


@dataclass(frozen=True)
class Shard:
    """One worker's shard of the data.

    Args:
        index: the shard's index, from 0.
        count: the number of shards; 1 if each worker reads all data.
        worker: the index of the worker that reads the shard. Workers with the same shard read it in different orders.
        step: the batches that this worker read in earlier launches: its data continues after them.
    """

    index: int = 0
    count: int = 1
    worker: int = 0
    step: int = 0


ALL = Shard()
"""All data."""

DatasetFunction = Callable[[Shard], tf.data.Dataset]
"""Makes the batches of a shard: each is `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""


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


_HERE = "/device:CPU:0"
_IDENTITY = {"index", "count", "worker"}
"""The attributes that say which shard it is."""


class _WatchedShard(Shard):
    """A shard that records whether its index, count or worker is read."""

    is_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in _IDENTITY:
            object.__setattr__(self, "is_read", True)
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Sharded:
    """A user's dataset function, checked for returning the requested shard.

    A function that never reads the shard's index, count or worker gives every worker the same data: all workers would
    train on each example. The check needs no data. It skips pipelines that call Python code, which may read the shard
    later.

    Args:
        function: the user's function.
        name: the function's name in messages.
        arrays: returns all examples of arrays that the function returned, None for anything else. tfdist divides arrays
            if the function has not done so.
    """

    function: Callable[[Shard], Any]
    name: str
    arrays: Callable[[Any], tf.data.Dataset | None] = lambda _: None

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Calls the function.

        Raises:
            TrainingError: there are several shards, and the function ignores the shard, or divides an order that each
                worker draws for itself.
        """
        watched = _WatchedShard(shard.index, shard.count, shard.worker, shard.step)
        dataset = self.function(watched if shard.count > 1 else shard)
        examples = self.arrays(dataset)
        if examples is not None:
            return examples if watched.is_read else examples.shard(shard.count, shard.index)
        if shard.count > 1 and isinstance(dataset, tf.data.Dataset) and is_sharded_after_a_draw(dataset):
            raise TrainingError(
                f"{self.name} divides a dataset that is shuffled without a seed: each worker takes a shard of an order "
                "of its own, so some examples come several times and others never",
                code="shard-of-a-shuffle",
                hint="shard first, and then shuffle; tf.data.Dataset.list_files shuffles too, unless shuffle=False",
            )
        if shard.count == 1 or watched.is_read or not isinstance(dataset, tf.data.Dataset) or calls_python(dataset):
            return dataset
        raise TrainingError(
            f"{self.name} does not use the shard, so each of {shard.count} workers would get all of the data",
            code="shard-ignored",
            hint="return dataset.shard(shard.count, shard.index); only if it is data to train on, and each worker is "
            "to train on all of it, write train: {share: copy} in the recipe, or pass tfdist.fit(..., share='copy')",
        )


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
        return _after(shard.step, ordered.batch(self.batch_size))

    def endless(self, shard: Shard) -> tf.data.Dataset:
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

        return _after(skipped, tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass))

    def _examples(self, shard: Shard) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.arrays).shard(shard.count, shard.index)


def _after(step: int, batches: tf.data.Dataset) -> tf.data.Dataset:
    """Skips `step` batches. For 0 it adds no `skip`, which data workers reject, since it counts elements."""
    return batches.skip(step) if step else batches


def cardinality(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements; None if it is unknown or infinite."""
    static = tf.get_static_value(dataset.cardinality())
    return None if static is None or static in _UNKNOWN else int(static)


def as_dataset_function(
    data: Any, batch_size: int | None = None, *, shuffle: bool = False, name: str = "x"
) -> DatasetFunction:
    """Converts what Keras users pass to `fit` to a dataset function.

    Args:
        data: a function that takes a `Shard` and returns a dataset of batches; a dataset of batches, of which each
            shard is every `shard.count`-th batch; or arrays `(x, y)` or `(x, y, sample_weight)`.
        batch_size: examples in a batch of arrays; None for 32, as in Keras.
        shuffle: whether arrays are shuffled, each pass in another order.
        name: what the data is for; functions for different purposes draw different random numbers.

    Raises:
        TrainingError: the data is none of these, the function takes no shard, or `as_arrays` rejects the arrays.
    """
    if isinstance(data, tf.data.Dataset):
        return DatasetShards(data)
    if callable(data):
        _check_takes_shard(data)
        return Sharded(SameDraws(data, name), "the dataset function")
    if isinstance(data, (tuple, list)) and 1 <= len(data) <= 3:
        return ArrayBatches(as_arrays(data), batch_size or KERAS_BATCH, shuffle)
    raise TrainingError(
        f"the type {type(data).__name__} is not supported as data",
        code="unsupported-data-type",
        hint="pass a dataset of batches, (x, y) arrays, or a function that takes a tfdist.Shard and returns a dataset",
    )


def _check_takes_shard(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-in functions may have no signature
        return
    try:
        signature.bind(Shard())
    except TypeError as error:
        raise TrainingError(
            f"the dataset function cannot be called with a tfdist.Shard: {error}",
            code="dataset-function-takes-no-shard",
            hint="give it one parameter, the shard that it returns: lambda shard: ...",
        ) from error


@dataclass(frozen=True)
class DatasetShards:
    """A dataset function of an existing dataset, on any task.

    A dataset is a value of the process that made it. A worker of parameter servers receives its graph from the chief.

    Args:
        dataset: the dataset of batches.
    """

    dataset: tf.data.Dataset

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Returns every `shard.count`-th batch.

        Raises:
            TrainingError: there are several shards, and each would be one of another order; or the dataset cannot be
                used on this task.
        """
        if shard.count > 1 and draws_in_functions(self.dataset):
            raise TrainingError(
                "the dataset draws its order within a function, or which elements come: in another way on each task, "
                "so the tasks would not divide it",
                code="order-drawn-in-function",
                hint="give what draws a seed, such as dataset.shuffle(1000, seed=1) or "
                "tf.data.Dataset.sample_from_datasets(..., seed=1)",
            )
        here = _device_of_remote_call()
        if here is not None:
            whole = _sent(self.dataset, here)
        elif shard.count > 1 and draws_an_order(self.dataset):
            whole = _in_one_order(self.dataset)
        else:
            whole = self.dataset
        return _after(shard.step, whole.shard(shard.count, shard.index))


def _in_one_order(data: tf.data.Dataset) -> tf.data.Dataset:
    """Makes a dataset again that is shuffled without a seed: a shard of each order of its own would not be a division.

    Raises:
        TrainingError: the dataset uses a table or a variable.
    """
    with tf.device(_HERE):
        return _made_again(
            data,
            _HERE,
            "the dataset is shuffled without a seed, in another order on each task, and uses a table or a variable",
            "give it a seed: dataset.shuffle(1000, seed=1)",
        )


def make_older_datasets_again() -> None:
    """Lets the program use datasets that it made before this task got its name in the cluster.

    Using one raises a `TrainingError` if it uses a table or a variable.
    """
    replace_older_datasets(
        lambda older: _made_again(
            older,
            _HERE,
            "the dataset is older than the cluster and uses a table or a variable, such as a StringLookup's",
            "call tfdist.is_chief() before you make the layer and the dataset, or use the layer in the model",
        )
    )


def _device_of_remote_call() -> str | None:
    """Returns this task's device if operations run on another task now; None if they run on this one."""
    caller = remote_caller()
    return caller and f"/job:{caller[0]}/replica:0/task:{caller[1]}/device:CPU:0"


def _sent(data: tf.data.Dataset, here: str) -> tf.data.Dataset:
    """Copies a dataset of this task to the task on which operations run now.

    Args:
        data: a dataset of this task.
        here: this task's device.

    Raises:
        TrainingError: the dataset calls Python code of this process.
    """
    if calls_python(data):
        raise TrainingError(
            "the dataset calls Python code (py_function, numpy_function, from_generator), which workers do not have",
            code="python-code-in-data",
            hint="pass a function that makes the dataset and returns its shard: "
            "tfdist.predict(model, lambda shard: make_dataset().shard(shard.count, shard.index))",
        )
    return _made_again(
        data,
        here,
        "the dataset uses a table or a variable, such as a StringLookup's, and neither can be sent to the workers",
        "use the layer in the model, or pass a function that makes the table and the dataset: "
        "tfdist.fit(model, lambda shard: make_dataset().shard(shard.count, shard.index))",
    )


def _made_again(data: tf.data.Dataset, here: str, problem: str, hint: str) -> tf.data.Dataset:
    """Makes a dataset of this task again, on the device on which operations run now.

    Args:
        data: the dataset.
        here: this task's device.
        problem: the message if the dataset uses a table or a variable.
        hint: what to do then.

    Raises:
        TrainingError: the dataset uses a table or a variable.
    """
    try:
        return recreated_on(data, here)
    except tf.errors.FailedPreconditionError as error:
        raise TrainingError(f"{problem}: {shortened(error).message}", code="table-in-dataset", hint=hint) from error


def repeated(function: DatasetFunction) -> DatasetFunction:
    """Returns a dataset function that repeats the data without end, starting after batch number `shard.step`.

    A function with a method `repeated` does so itself. `function` may ignore `shard.step`. The returned function raises
    a `TrainingError` for a shard without batches.
    """
    if isinstance(function, ArrayBatches):
        return function.endless

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


def empty_shard(shard: Shard) -> TrainingError:
    """Returns the error for a shard without data."""
    return TrainingError(
        f"there is no data for worker:{shard.worker} (shard {shard.index} of {shard.count})",
        code="empty-shard",
        hint="use fewer workers, smaller batches or more data, or shard the data by examples instead of files",
    )


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


def checked(function: DatasetFunction, shard: Shard) -> tf.data.Dataset:
    """Calls a dataset function and checks its result.

    Raises:
        TrainingError: the result is not a dataset, or its elements are not `(x[, y[, sample_weight]])`.
    """
    dataset = function(shard)
    if not isinstance(dataset, tf.data.Dataset):
        raise TrainingError(
            f"the dataset function returned {type(dataset).__name__}, not a tf.data.Dataset",
            code="not-a-dataset",
            hint="return a tf.data.Dataset of (x, y) or (x, y, sample_weight)",
        )
    spec = dataset.element_spec
    if isinstance(spec, tuple) and len(spec) > 3:
        raise TrainingError(
            f"the data's elements have {len(spec)} parts",
            code="too-many-parts",
            hint="yield (x, y) or (x, y, sample_weight)",
        )
    return _without_tuning(dataset)


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns autotuning off, unless the dataset's options turn it on.

    `tf.data.AUTOTUNE` then chooses each value once. The tuning thread sleeps for increasing times, and destroying an
    iterator sometimes waits for it for seconds.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def is_endless(function: DatasetFunction, shard: Shard) -> bool:
    """Returns whether data is known to repeat without end."""
    return bool(tf.get_static_value(checked(function, shard).cardinality()) == tf.data.INFINITE_CARDINALITY)


def with_length(function: DatasetFunction, lengths: Mapping[tuple[int, int], int]) -> DatasetFunction:
    """Returns a dataset function whose passes have a length that was counted.

    A pass that has become shorter continues with the next one, and one that has become longer is cut.

    Args:
        function: the data.
        lengths: the elements of each shard, by its index and count; at least 1.
    """

    def limited(shard: Shard) -> tf.data.Dataset:
        length = lengths.get((shard.index, shard.count))
        return function(shard) if length is None or shard.step else function(shard).repeat().take(length)

    return limited


def count(function: DatasetFunction, shard: Shard) -> int:
    """Returns the number of elements of a shard; reads all of them."""
    return int(checked(function, shard).reduce(np.int64(0), lambda number, *_: number + 1))


def counting_function() -> Any:
    """Returns a `tf.function` that counts the elements of an iterator: int64, shape ()."""

    @tf.function(autograph=False)
    def counted(iterator: Any) -> tf.Tensor:
        def following(_: Any, number: tf.Tensor) -> tuple[Any, tf.Tensor]:
            return iterator.get_next_as_optional(), number + 1

        begin = iterator.get_next_as_optional(), tf.zeros([], tf.int64)
        return tf.while_loop(lambda optional, _: optional.has_value(), following, begin, parallel_iterations=1)[1]

    return counted


def check_ends(function: DatasetFunction, shard: Shard = ALL) -> None:
    """Checks that data for evaluation ends.

    Raises:
        TrainingError: the data repeats without end.
    """
    if is_endless(function, shard):
        raise TrainingError(
            "the data for evaluation never ends",
            code="endless-evaluation-data",
            hint="remove .repeat(), or set the number of batches: evaluate: {steps: ...} in a recipe, "
            "tfdist.Validation(data, steps=...), or tfdist.evaluate(model, data, steps=...)",
        )


def steps_in(function: DatasetFunction, shards: list[Shard], *, synchronous: bool) -> int | None:
    """Counts the steps of one pass over the data.

    Args:
        function: the data.
        shards: the shards of all workers.
        synchronous: whether the workers step together, so that the shortest shard ends the pass.

    Returns:
        The batches of the shortest shard if `synchronous`, else of all shards; None if a length is unknown or infinite.
    """
    lengths = []
    for shard in shards:
        length = cardinality(checked(function, replace(shard, step=0)))
        if length is None:
            return None
        lengths.append(length)
    return min(lengths) if synchronous else sum(lengths)
