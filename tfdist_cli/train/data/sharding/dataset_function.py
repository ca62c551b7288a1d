"""The user's dataset functions, checked for returning the shard that was requested."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.tf_compat.data import calls_python, is_sharded_after_a_draw

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


def check_takes_shard(function: Callable[..., Any]) -> None:
    """Checks that a dataset function can be called with a shard.

    Raises:
        TrainingError: it cannot.
    """
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
