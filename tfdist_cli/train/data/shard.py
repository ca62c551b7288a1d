"""A worker's shard of the data, and the functions that map a shard to its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfdist_cli.errors import TrainingError


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


def empty_shard(shard: Shard) -> TrainingError:
    """Returns the error for a shard without data."""
    return TrainingError(
        f"there is no data for worker:{shard.worker} (shard {shard.index} of {shard.count})",
        code="empty-shard",
        hint="use fewer workers, smaller batches or more data, or shard the data by examples instead of files",
    )
