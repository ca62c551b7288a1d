"""Gradients between replicas: as one tensor of each type, rounded to the wire's type before they are summed.

Every tensor costs rounds of requests whatever its size. Cut into two, a tensor of 700,000 numbers took half as long
again to be summed, and there is no core to spare for it while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.spec.sections.updates import WireType

Sum = Callable[[tf.Tensor], tf.Tensor]
"""A replica's tensor → the sum of all replicas', the same on each of them."""


class GradientPacking:
    """How gradients are summed.

    Args:
        shapes: the parameters' shapes.
        wire: the type in which float32 and float64 gradients cross; `float32` leaves both as they are.
        packed: whether those of a type cross as one tensor.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], wire: WireType, *, packed: bool = True) -> None:
        self._packed = packed
        self._shapes = [tuple(shape) for shape in shapes]
        self._wire = None if wire == "float32" else tf.as_dtype(wire)

    def sums(self, gradients: Sequence[Any], sum_up: Sum) -> tuple[list[Any], tf.Tensor]:
        """The sums of all replicas' gradients.

        What is summed, and so what every replica updates with, its own part included, is rounded: replicas that kept
        their own part as it was would drift apart.

        Args:
            gradients: a replica's own, one for each parameter: a tensor, `tf.IndexedSlices` or None. They are divided
                by the number of replicas already, so that a sum overflows only where their mean would.
            sum_up: the all-reduce.

        Returns:
            The sums, dense and in the parameters' types, None where there is no gradient; and whether float16 could not
            hold one of them, bool of shape ().
        """
        dense: list[Any] = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        overflow = tf.constant(False)
        groups: dict[Any, list[int]] = {}
        for n, gradient in enumerate(dense):
            if gradient is not None:
                groups.setdefault(gradient.dtype if self._packed else n, []).append(n)
        for places in groups.values():
            dtype = dense[places[0]].dtype
            sizes = [int(np.prod(self._shapes[n])) for n in places]
            rounded = [self._rounded(dense[n]) for n in places]
            # Sizes stay known, also where rows that were looked up have become a whole table.
            flat = [tf.reshape(each, [size]) for each, size in zip(rounded, sizes, strict=True)]
            summed = sum_up(tf.concat(flat, axis=0))
            if summed.dtype == tf.float16 != dtype:
                overflow |= ~tf.reduce_all(tf.math.is_finite(summed))
            parts = tf.split(summed, sizes)
            for n, part in zip(places, parts, strict=True):
                dense[n] = tf.cast(tf.reshape(part, self._shapes[n]), dtype)
        return dense, overflow

    def size(self, gradients: Sequence[Any]) -> int:
        """Bytes that a replica gives to the all-reduce of a step."""
        given = [tf.as_dtype(each.dtype) for each in gradients if each is not None]
        shapes = [shape for shape, each in zip(self._shapes, gradients, strict=True) if each is not None]
        return sum(int(np.prod(shape)) * self._width(dtype) for shape, dtype in zip(shapes, given, strict=True))

    def _width(self, dtype: tf.DType) -> int:
        return int(dtype.size if self._wire is None else min(dtype.size, self._wire.size))

    def _rounded(self, flat: tf.Tensor) -> tf.Tensor:
        if self._wire is None or flat.dtype.size <= self._wire.size:
            return flat
        return tf.cast(flat, self._wire)
