"""Batches that are divided among workers: each worker reads all of a batch, and trains on its part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked


@dataclass(frozen=True)
class DividedBatches:
    """The batches of updates, of which each worker takes a part. It does not depend on the parts what a batch contains.

    Args:
        batch: examples in a worker's batch, on average.
        workers: how many workers there are.
        element_spec: the `tf.TypeSpec`s of a worker's batch.
    """

    batch: int
    workers: int
    element_spec: Any

    @classmethod
    def of(cls, element_spec: Any, workers: int) -> DividedBatches:
        """Divides the batches of several workers anew.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch, all of the same size.
            workers: how many workers there are.

        Raises:
            TrainingError: the batches have no fixed size, or contain something else than dense tensors.
        """
        specs = tf.nest.flatten(element_spec)
        if not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in specs):
            raise TrainingError(
                "updates.batch: proportional divides dense tensors only, and the data has others",
                code="batch-not-divisible",
                hint="convert sparse and ragged tensors in the model, or remove updates.batch",
            )
        batch = specs[0].shape[0]
        if batch is None:
            raise TrainingError(
                "updates.batch: proportional needs batches of one size, and these may have any",
                code="batch-size-unknown",
                hint="make the batches with dataset.batch(N, drop_remainder=True), where arrays are "
                "tf.data.Dataset.from_tensor_slices((x, y))",
            )
        return cls(batch, workers, _with_first(element_spec, None))

    @property
    def whole_spec(self) -> Any:
        """The `tf.TypeSpec`s of what `whole` returns."""
        return _with_first(self.element_spec, self.batch * self.workers)

    def whole(self, data: DatasetFunction) -> DatasetFunction:
        """Returns a function of a shard that returns the batches of updates."""

        def batches(shard: Shard) -> tf.data.Dataset:
            return checked(data, shard).rebatch(self.batch * self.workers, drop_remainder=True).prefetch(1)

        return batches


def part(batch: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Returns some examples of a batch of dense tensors."""
    return tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)


def _with_first(element_spec: Any, size: int | None) -> Any:
    return tf.nest.map_structure(lambda spec: tf.TensorSpec([size, *spec.shape[1:]], spec.dtype), element_spec)
