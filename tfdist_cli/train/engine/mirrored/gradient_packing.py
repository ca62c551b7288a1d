"""Sums the gradients of replicas, those of each type together, rounded to the wire's type before.

Every sum costs several requests, whatever its size. Split into two, a tensor of 700,000 numbers took 1.5 times as
long to sum, and while the backward pass runs, no core is idle that could sum the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.spec.sections.updates import WireType
from tfdist_cli.train.cluster.all_reduce.packing import packed, unpacked

Sums = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]
"""A replica's tensors of one type → their sums over all replicas, the same on each of them."""


class GradientPacking:
    """Packs, rounds and sums gradients.

    Args:
        shapes: the parameters' shapes.
        wire: the type in which float32 and float64 gradients cross; `float32` leaves both unchanged.
        packed: whether the gradients of a type cross together.
        squares: the indices of those that are sums of squares, for which float16 has no range.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        wire: WireType,
        *,
        packed: bool = True,
        squares: Container[int] = (),
    ) -> None:
        self._packed, self._squares = packed, squares
        self._shapes = [tuple(shape) for shape in shapes]
        self._wire = None if wire == "float32" else tf.as_dtype(wire)

    def sums(self, gradients: Sequence[Any], all_reduce: Sums) -> tuple[list[Any], tf.Tensor]:
        """Returns the sums of all replicas' gradients.

        A replica's own gradients are rounded, too, before they are summed: replicas that used their own gradients
        unrounded would drift apart.

        Args:
            gradients: a replica's own, one for each parameter: a tensor, `tf.IndexedSlices` or None. They are already
                divided by the number of replicas, so that a sum overflows only if the mean does.
            all_reduce: the all-reduce.

        Returns:
            The sums, dense and in the parameters' types, None where there is no gradient; and whether one of them
            exceeds the range of float16, bool of shape ().
        """
        dense: list[Any] = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        overflow = tf.constant(False)
        groups: dict[Any, list[int]] = {}
        for n, gradient in enumerate(dense):
            if gradient is not None:
                types = gradient.dtype, self._wire_type(n, gradient.dtype)
                groups.setdefault(types if self._packed else n, []).append(n)
        for members in groups.values():
            dtype = dense[members[0]].dtype
            rounded = [tf.cast(dense[n], self._wire_type(n, dtype)) for n in members]
            # The shapes stay static, also those of tables whose looked-up rows have become dense gradients.
            shaped = [tf.reshape(each, self._shapes[n]) for n, each in zip(members, rounded, strict=True)]
            if shaped[0].dtype == tf.float16 != dtype:
                (summed,) = all_reduce([packed(shaped)])  # one tensor to check
                overflow |= ~tf.reduce_all(tf.math.is_finite(summed))
                sums: Sequence[tf.Tensor] = unpacked(summed, shaped)
            else:
                sums = all_reduce(shaped)
            for n, total in zip(members, sums, strict=True):
                dense[n] = tf.cast(total, dtype)
        return dense, overflow

    def size(self, gradients: Sequence[Any]) -> int:
        """Bytes that a replica adds to the all-reduce of a step."""
        given = [(n, tf.as_dtype(each.dtype)) for n, each in enumerate(gradients) if each is not None]
        return sum(int(np.prod(self._shapes[n])) * int(self._wire_type(n, dtype).size) for n, dtype in given)

    def _wire_type(self, index: int, dtype: tf.DType) -> tf.DType:
        """The type in which a gradient crosses."""
        if self._wire is None or dtype.size <= self._wire.size:
            return dtype
        return dtype if self._wire == tf.float16 and index in self._squares else self._wire
