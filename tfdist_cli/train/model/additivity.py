"""Decides from a step's graph whether the step only adds to a variable.

Several workers count in their own copy of a metric variable, each from the initial value. Their counts can be added if
every step adds a term to the variable that depends on the batch alone. Running the step cannot show that: a maximum
looks like a sum as long as no value exceeds it. So the operations between the old and the new value are inspected.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_SUMMED_OPERANDS: dict[str, Sequence[int]] = {
    "Identity": (0,),
    "StopGradient": (0,),
    "EnsureShape": (0,),
    "Reshape": (0,),
    "Squeeze": (0,),
    "ExpandDims": (0,),
    "Cast": (0,),
    "Add": (0, 1),
    "AddV2": (0, 1),
    "AddN": range(1 << 16),
    "BiasAdd": (0, 1),
    "Sub": (0,),
    "TensorScatterAdd": (0,),
    "TensorScatterSub": (0,),
}
"""By operation type: the operands to which the operation adds a term (or 0) computed from its other operands."""


def adds_up(before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> list[bool]:
    """Returns, for each variable, whether its new value is the old one plus a term that depends on no old value.

    Args:
        before: the old values, distinct tensors of the graph under construction.
        after: the new value of each.
    """
    dependent = dependents(before)
    return [_is_sum(new, old, dependent) for old, new in zip(before, after, strict=True)]


def _is_sum(new: tf.Tensor, old: tf.Tensor, dependent: set[str]) -> bool:
    while tf.is_symbolic_tensor(new) and new.op.name != old.op.name:
        operation = new.op
        if operation.type == "SelectV2":
            condition, *choices = operation.inputs
            return condition.op.name not in dependent and all(_is_sum(choice, old, dependent) for choice in choices)
        operands = [index for index, operand in enumerate(operation.inputs) if operand.op.name in dependent]
        if len(operands) != 1 or operands[0] not in _SUMMED_OPERANDS.get(operation.type, ()):
            return False
        new = operation.inputs[operands[0]]
        if new.dtype == tf.bool:
            return False
    return tf.is_symbolic_tensor(new)


def dependents(tensors: Sequence[tf.Tensor]) -> set[str]:
    """Returns the names of the operations that compute any of `tensors`, or whose result may depend on one of them."""
    operations = [tensor.op for tensor in tensors]
    found = {operation.name for operation in operations}
    while operations:
        for output in operations.pop().outputs:
            new = [consumer for consumer in output.consumers() if consumer.name not in found]
            found.update(consumer.name for consumer in new)
            operations += new
    return found
