"""The length of data: known, counted, or without end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.shard import ALL, DatasetFunction, Shard, checked

_UNKNOWN = (tf.data.UNKNOWN_CARDINALITY, tf.data.INFINITE_CARDINALITY)


def cardinality(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements; None if it is unknown or infinite."""
    static = tf.get_static_value(dataset.cardinality())
    return None if static is None or static in _UNKNOWN else int(static)


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
