"""Tensors of one type as a single one, shape (n,), and back."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def packed(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the numbers of tensors one after another, shape (n,)."""
    flat = [tf.reshape(value, [-1]) for value in values]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def unpacked(flat: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the parts of a tensor, shape (n,), that have the static shapes of the tensors that it was packed from."""
    parts = [flat] if len(values) == 1 else tf.split(flat, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]
