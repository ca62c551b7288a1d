"""Divides a batch into micro-batches, which pass through the stages of a model one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Args:
        batch: its examples.
        examples: how many they are, int64, shape (); None if all parts of all batches are equal.
        counts: whether it counts, bool, shape (); None: it does. A batch with fewer examples than parts has parts
            without examples. Their `batch` is an example of another part, since layers cannot compute none.
    """

    batch: Any
    examples: tf.Tensor | None = None
    counts: tf.Tensor | None = None


@dataclass(frozen=True)
class MicroBatches:
    """The parts of batches.

    Args:
        count: how many there are.
        element_spec: the `tf.TypeSpec`s of one.
        equal: whether all parts of all batches have the same size.
    """

    count: int
    element_spec: Any
    equal: bool = True

    @classmethod
    def of(cls, element_spec: Any, count: int, replicas: int = 1) -> MicroBatches:
        """Divides batches.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            count: the number of its parts.
            replicas: the number of batches of a step.

        Raises:
            TrainingError: the batches contain tensors without a dimension of examples.
        """
        specs = tf.nest.flatten(element_spec)
        sizes = {spec.shape[0] if isinstance(spec, tf.TensorSpec) and spec.shape.rank else None for spec in specs}
        size = sizes.pop() if len(sizes) == 1 else None
        if count * replicas == 1 or (count == 1 and size is not None):
            return cls(count, element_spec)
        if size is not None and size % count == 0:
            return cls(count, _with_size(element_spec, size // count))
        divisible = all(isinstance(spec, _DIVISIBLE) and spec.shape.rank for spec in specs)
        if count == 1:
            return cls(1, element_spec, equal=not divisible)
        if not divisible:
            raise TrainingError(
                f"the data has tensors without a dimension of examples, which cannot be divided into {count} parts",
                code="micro-batches-do-not-fit",
                hint="remove micro_batches, or give each tensor of a batch the examples as its first dimension",
            )
        return cls(count, _with_size(element_spec, None), equal=False)

    def parts(self, batch: Any) -> list[MicroBatch]:
        """Returns the parts of a batch, whose sizes differ by one example at most."""
        flat = tf.nest.flatten(batch)
        if self.equal:
            if self.count == 1:
                return [MicroBatch(batch)]
            split = zip(*(tf.split(tensor, self.count) for tensor in flat), strict=True)
            return [MicroBatch(tf.nest.pack_sequence_as(batch, list(each))) for each in split]
        size = _size(flat[0])
        if self.count == 1:
            return [MicroBatch(batch, tf.convert_to_tensor(size, tf.int64))]
        parts = []
        for number in range(self.count):
            begin, end = size * number // self.count, size * (number + 1) // self.count
            examples, counts = tf.convert_to_tensor(end - begin, tf.int64), None
            if not isinstance(size, int) or size < self.count:
                counts = examples > 0
                begin = tf.minimum(begin, size - 1)
                end = tf.maximum(end, begin + 1)
            own = [_examples_of(tensor, begin, end) for tensor in flat]
            parts.append(MicroBatch(tf.nest.pack_sequence_as(batch, own), examples, counts))
        return parts


_DIVISIBLE = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def _with_size(element_spec: Any, size: int | None) -> Any:
    """Returns the specs of batches of another size."""

    def changed(spec: Any) -> Any:
        shape = [size, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        return type(spec)(shape, spec.dtype)

    return tf.nest.map_structure(changed, element_spec)


def _size(tensor: Any) -> Any:
    """The number of examples: an int if it is known, else int64, shape ()."""
    known = None if isinstance(tensor, tf.SparseTensor) else tensor.shape[0]
    if known is not None:
        return int(known)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.cast(tensor.nrows(), tf.int64) if isinstance(tensor, tf.RaggedTensor) else tf.shape(tensor, tf.int64)[0]


def _examples_of(tensor: Any, begin: Any, end: Any) -> Any:
    """Returns the examples from one on, up to another."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin:end]
    begin, end = (tf.cast(each, tf.int64) for each in (begin, end))
    others = tensor.dense_shape[1:]
    rank = int(np.asarray(tensor.shape.rank))
    start = tf.concat([[begin], tf.zeros([rank - 1], tf.int64)], axis=0)
    part = tf.sparse.slice(tensor, start, tf.concat([[end - begin], others], axis=0))
    return tf.sparse.reshape(part, tf.concat([[end - begin], others], axis=0))
