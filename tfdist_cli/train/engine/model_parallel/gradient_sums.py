"""Sums the gradients of micro-batches.

The gradient of a layer's weights is a product of the layer's inputs and of the gradients of its outputs, which sums
over the examples. One product of all micro-batches' examples is the sum of their products, and is what one process
computes. It reads and writes the weights' shape once, and not once for each micro-batch. It also leaves less to do
between a micro-batch's arrival and the gradient that an earlier stage waits for (Qi et al., Zero Bubble Pipeline
Parallelism, 2023). But inputs and gradients of all micro-batches are kept for it: it is used where these are smaller
than the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_UNARY = ("Identity", "Reshape", "Cast")
"""Operations between a product and the gradient, for which the order of them and of the sum makes no difference."""
_FACTORS = {
    "MatMul": (0, 1),
    "Conv2DBackpropFilter": (0, 2),
    "Conv3DBackpropFilterV2": (0, 2),
    "DepthwiseConv2dNativeBackpropFilter": (0, 2),
}
"""Operations that may sum over the examples, the first dimension of both factors, and which inputs the factors are."""


def sum_gradients(gradients: Sequence[Any], *, once: bool = False) -> tf.Tensor | tf.IndexedSlices:
    """Returns the sum of the gradients of a variable, one for each micro-batch, where they are computed.

    Args:
        gradients: tensors of the same shape, or `tf.IndexedSlices`. The sum of these has all of their rows, so that it
            is the gradient of the whole batch: it matters to some optimizers how often a row occurs.
        once: whether all of them have the same rows, as those of positions, which the whole batch looks up once.
    """
    if len(gradients) == 1:
        return gradients[0]
    if not once and all(isinstance(each, tf.IndexedSlices) for each in gradients):
        return _joined(gradients)
    chains = [_chain(each) for each in gradients]
    if all(chains) and len({tuple(op.type for op in chain) for chain in chains}) == 1:
        return _reapplied(chains[0][:-1], _product_of_all([chain[-1] for chain in chains]))
    total = tf.convert_to_tensor(gradients[0])
    for each in gradients[1:]:  # and not all at once, so that no more than two of them are kept
        total += tf.convert_to_tensor(each)
    return total


def computed_alone(gradient: Any) -> tf.Tensor:
    """Returns what is computed of a gradient before those of the other micro-batches are known.

    Args:
        gradient: a tensor or `tf.IndexedSlices` of one micro-batch.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    chain = _chain(gradient)
    return _factors(chain[-1])[1] if chain else gradient


def _chain(gradient: Any) -> list[tf.Operation]:
    """Returns the operations from a gradient back to the product that it is, where one product of all pays."""
    if not isinstance(gradient, tf.Tensor):
        return []
    found = [gradient.op]
    while found[-1].type in _UNARY:
        found.append(found[-1].inputs[0].op)
    pays = _sums_over_examples(found[-1]) and _bytes(_factors(found[-1])) < _bytes([gradient])
    return found if pays else []


def _sums_over_examples(operation: tf.Operation) -> bool:
    if operation.type not in _FACTORS:
        return False
    if operation.type == "MatMul":
        return bool(operation.get_attr("transpose_a")) and not operation.get_attr("transpose_b")
    return True


def _factors(product: tf.Operation) -> list[tf.Tensor]:
    return [product.inputs[index] for index in _FACTORS[product.type]]


def _product_of_all(products: Sequence[tf.Operation]) -> tf.Tensor:
    """Returns the sum of products as one product."""
    first = products[0]
    with tf.device(first.device):
        joined = [tf.concat(each, axis=0) for each in zip(*map(_factors, products), strict=True)]
        inputs = list(first.inputs)
        for index, factor in zip(_FACTORS[first.type], joined, strict=True):
            inputs[index] = factor
        return _copied(first, inputs)


def _joined(rows: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Returns the rows of all micro-batches."""
    with tf.device(rows[0].values.device):
        values, indices = (tf.concat(each, axis=0) for each in zip(*((r.values, r.indices) for r in rows), strict=True))
    return tf.IndexedSlices(values, indices, rows[0].dense_shape)


def _reapplied(operations: Sequence[tf.Operation], value: tf.Tensor) -> tf.Tensor:
    """Applies the operations that followed a product to another one, the last operation first."""
    for operation in reversed(operations):
        with tf.device(operation.device):
            value = _copied(operation, [value, *operation.inputs[1:]])
    return value


def _copied(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds an operation like another one, with other inputs, to the current graph."""
    graph = tf.compat.v1.get_default_graph()
    attributes = {each.name: operation.node_def.attr[each.name] for each in operation.op_def.attr}
    created = graph.create_op(
        operation.type,
        list(inputs),
        [output.dtype for output in operation.outputs],
        attrs=attributes,
        op_def=operation.op_def,
        name=f"sum_{operation.type}",
    )
    return created.outputs[0]


def _bytes(tensors: Sequence[tf.Tensor]) -> float:
    """The bytes of tensors; infinite if a shape is not known."""
    if not all(each.shape.is_fully_defined() for each in tensors):
        return np.inf
    return float(sum(each.dtype.size * np.prod(each.shape) for each in tensors))
