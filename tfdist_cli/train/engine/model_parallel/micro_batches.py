"""Divides a batch into micro-batches, which pass through the stages of a model one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError


@dataclass(frozen=True)
class MicroBatches:
    """The parts of a batch, all of the same size.

    Args:
        count: how many there are.
        element_spec: the `tf.TypeSpec`s of one.
    """

    count: int
    element_spec: Any

    @classmethod
    def of(cls, element_spec: Any, count: int) -> MicroBatches:
        """Divides batches.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            count: the number of its parts.

        Raises:
            TrainingError: the batches have no fixed size that is a multiple of the parts, or contain other tensors than
                dense ones.
        """
        if count == 1:
            return cls(1, element_spec)
        specs = tf.nest.flatten(element_spec)
        dense = all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in specs)
        size = specs[0].shape[0] if dense else None
        if size is None or size % count:
            has = f"batches of {size} examples" if size else "batches of no fixed size, or tensors that are not dense"
            raise TrainingError(
                f"the data has {has}, which cannot be divided into {count} equal micro-batches",
                code="micro-batches-do-not-fit",
                hint="use a multiple of micro_batches as the batch size, and batch(N, drop_remainder=True)",
            )
        return cls(
            count,
            tf.nest.map_structure(
                lambda spec: tf.TensorSpec([size // count, *spec.shape[1:]], spec.dtype), element_spec
            ),
        )

    def parts(self, batch: Any) -> list[Any]:
        """Returns the parts of a batch."""
        if self.count == 1:
            return [batch]
        flat = [tf.split(tensor, self.count) for tensor in tf.nest.flatten(batch)]
        return [tf.nest.pack_sequence_as(batch, list(each)) for each in zip(*flat, strict=True)]
