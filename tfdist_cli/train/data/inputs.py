"""What Keras's `fit` takes as data, under its names, as functions of a shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.data.arrays import as_arrays, is_array
from tfdist_cli.train.data.pipeline import ArrayBatches
from tfdist_cli.train.data.python_data.dataset_function import PythonData, read_by_chief, source_of
from tfdist_cli.train.data.python_data.sources import is_python_data
from tfdist_cli.train.data.shard import DatasetFunction, Shard
from tfdist_cli.train.data.sharding.dataset_function import Sharded, check_takes_shard
from tfdist_cli.train.data.sharding.existing_dataset import DatasetShards
from tfdist_cli.train.data.sharding.same_draws import SameDraws
from tfdist_cli.train.tf_compat.data import (
    calls_python,
    draws_in_functions,
    packed_arrays,
    split_for_validation,
    with_class_weights,
)

KERAS_BATCH = 32
"""Examples in a batch of arrays by default, as in Keras."""
_PARTS = ("x", "y", "sample_weight")


@dataclass(frozen=True)
class Inputs:
    """The data of one call.

    Args:
        x: inputs: arrays, in lists and dicts; or data that has the targets and weights in it. A tuple without `y` is
            `(x, y)` or `(x, y, sample_weight)`.
        y: the targets of arrays.
        sample_weight: the weights of arrays' examples, in the structure of the targets or one array for all.
        class_weight: the weight of each class.
        name: what the data is called in messages.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Mapping[int, float] | None = None
    name: str = field(default="x", compare=False)

    @classmethod
    def of(
        cls, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, *, name: str = "x"
    ) -> Inputs:
        """Returns the data of a call; a tuple without targets is `(x, y)` or `(x, y, sample_weight)`."""
        if isinstance(x, tuple) and y is None and sample_weight is None and 1 <= len(x) <= len(_PARTS):
            x, y, sample_weight = (*x, None, None)[: len(_PARTS)]
        return cls(x, y, sample_weight, class_weight, name)

    def check(self) -> None:
        """Checks the type of the data, and that targets and weights go with it.

        Raises:
            TrainingError: it is no data.
            UsageError: the targets or weights are part of it already.
        """
        if self.arrays:
            return
        if not (isinstance(self.x, tf.data.Dataset) or callable(self.x) or is_python_data(self.x)):
            as_dataset_function(self.x)  # which names the types that are data
        for name, value in (("y", self.y), ("sample_weight", self.sample_weight)):
            if value is not None:
                raise UsageError(
                    f"{self.name} has the type {type(self.x).__name__}, whose batches contain the targets and weights: "
                    f"{name} must not be given",
                    code="targets-given-twice",
                    hint="yield (x, y) or (x, y, sample_weight)",
                )

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays `(x[, y[, sample_weight]])` as Keras trains on them; empty if the data is none.

        Raises:
            TrainingError: see `as_arrays`.
            UsageError: the weights do not go with the targets.
        """
        if not isinstance(self.x, (list, tuple, Mapping)) and not is_array(self.x):
            return ()
        with _keras_errors("invalid-weights"):
            return _as_floatx(packed_arrays(*self._read(), self.class_weight))

    def _read(self) -> tuple[Any, Any, Any]:
        x, y, weight, *_ = *as_arrays((self.x, self.y, self.sample_weight)), None, None
        return x, y, weight

    def split(self, fraction: float) -> tuple[Inputs, Inputs]:
        """Returns the first part of arrays, to train on, and the last, to validate with.

        Raises:
            UsageError: the data is not arrays, or a part would be empty.
        """
        if not self.arrays:
            raise UsageError(
                f"validation_split is for arrays, and {self.name} has the type {type(self.x).__name__}",
                code="split-without-arrays",
                hint="pass validation_data",
            )
        with _keras_errors("invalid-split"):
            first, last = split_for_validation(self._read(), fraction)
        (x, y, weight), (held_x, held_y, held_weight) = first, last
        training = Inputs(x, y, weight, self.class_weight, self.name)
        return training, Inputs(held_x, held_y, held_weight, name="validation_data")

    @property
    def examples(self) -> int | None:
        """The number of examples of arrays; None for other data."""
        return int(tf.nest.flatten(self.arrays)[0].shape[0]) if self.arrays else None

    def dataset_function(
        self, batch_size: int | None, *, batches: int | None = None, shuffle: bool, by_chief: bool = False
    ) -> DatasetFunction:
        """Returns the data as a function of a shard that returns its batches.

        Args:
            batch_size: examples in a batch of arrays; None for 32.
            batches: into how many batches arrays are divided if no `batch_size` is given, as Keras does where a number
                of steps is given.
            shuffle: whether arrays are shuffled, each pass in another order.
            by_chief: whether the chief reads for all workers a dataset that calls Python code, which they do not have,
                or whose order is drawn within a function, which each of them would draw for itself.

        Raises:
            UsageError: a batch size is given, and the data comes in batches; or targets are given twice.
            TrainingError: it is not data that Keras takes.
        """
        self.check()
        if self.examples is not None:
            if batch_size is None and batches:
                batch_size = math.ceil(self.examples / batches)
            return ArrayBatches(self.arrays, batch_size or KERAS_BATCH, shuffle)
        if batch_size is not None:
            raise UsageError(
                "batch_size is for arrays, and this data comes in batches",
                code="batch-size-without-arrays",
                hint=f"leave batch_size out; dataset.batch({batch_size}) makes batches",
            )
        if is_python_data(self.x):
            with _keras_errors("unsupported-python-data"):
                return PythonData(source_of(self.x, self.class_weight, shuffle=shuffle))
        function = as_dataset_function(self.x, name=self.name)
        if by_chief and isinstance(function, DatasetShards) and _has_one_reader(function.dataset):
            return read_by_chief(weighted(function, self.class_weight)(Shard()))
        return weighted(function, self.class_weight)


def _has_one_reader(dataset: tf.data.Dataset) -> bool:
    """Whether workers cannot divide a dataset by reading it themselves."""
    return calls_python(dataset) or draws_in_functions(dataset)


def weighted(function: DatasetFunction, class_weight: Mapping[int, float] | None) -> DatasetFunction:
    """Returns a function whose batches have the sample weights that follow from the class weights, if there are any.

    The returned function raises a `UsageError` if the batches have sample weights, or several targets.
    """
    return function if class_weight is None else _Weighted(function, dict(class_weight))


def unweighted(function: DatasetFunction) -> tuple[DatasetFunction, Mapping[int, float] | None]:
    """Returns a function without the class weights that `weighted` has added, and these weights.

    The weights can then be added after other transformations of the batches, which have to see the user's own.
    """
    return (function.function, function.weights) if isinstance(function, _Weighted) else (function, None)


@dataclass(frozen=True)
class _Weighted:
    """A dataset function with class weights, see `weighted`.

    Args:
        function: the function.
        weights: the weight of each class.
    """

    function: DatasetFunction
    weights: dict[int, float]

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        return _with_weights(self.weights, self.function(shard))


def _with_weights(weights: dict[int, float], dataset: Any) -> Any:
    if not isinstance(dataset, tf.data.Dataset):
        return dataset  # an error of its own
    with _keras_errors("invalid-weights"):
        return with_class_weights(dataset, weights)


@contextmanager
def _keras_errors(code: str) -> Iterator[None]:
    """Raises Keras's refusals as usage errors."""
    try:
        yield
    except ValueError as error:
        raise UsageError(" ".join(str(error).split()), code=code) from error


def _as_floatx(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts floats to Keras's `floatx`, as Keras does with arrays."""
    floatx = keras.config.floatx()

    def converted(array: Any) -> Any:
        kind = tf.as_dtype(array.dtype)
        if not kind.is_floating or kind.name == floatx:
            return array
        return tf.cast(array, floatx) if tf.is_tensor(array) else array.astype(floatx)

    return tuple(tf.nest.map_structure(converted, part) for part in arrays)


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
        check_takes_shard(data)
        return Sharded(SameDraws(data, name), "the dataset function")
    if isinstance(data, (tuple, list)) and 1 <= len(data) <= 3:
        return ArrayBatches(as_arrays(data), batch_size or KERAS_BATCH, shuffle)
    raise TrainingError(
        f"the type {type(data).__name__} is not supported as data",
        code="unsupported-data-type",
        hint="pass a dataset of batches, (x, y) arrays, or a function that takes a tfdist.Shard and returns a dataset",
    )
