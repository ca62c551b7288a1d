"""The factors of gradients.

The gradient of a matrix that a batch is multiplied by is a product: of the batch, transposed, and of the gradient of
the result. Both can have far fewer values than the gradient.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def factors_of(gradient: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns the factors of a gradient in a function that is being traced.

    Args:
        gradient: the gradient of a parameter.

    Returns:
        Two matrices with a row for each example: the product of the transposed first one and the second one is the
        gradient. None if it is not such a product, or is known to have no certain number of rows.
    """
    if not tf.is_tensor(gradient) or not tf.is_symbolic_tensor(gradient) or gradient.op.type != "MatMul":
        return None
    transposed = gradient.op.get_attr("transpose_a"), gradient.op.get_attr("transpose_b")
    first, second = gradient.op.inputs
    certain = first.shape.is_fully_defined() and second.shape.is_fully_defined()
    return (first, second) if transposed == (True, False) and certain else None
