"""Decides from a step's graph how a variable's new value depends on its old one: which are sums and moving averages.

Several workers count in their own copy of a metric variable, each from the initial value. Their counts can be added if
every step adds a term to the variable that depends on the batch alone. Running the step cannot show that: a maximum
looks like a sum as long as no value exceeds it. So the operations between the old and the new value are inspected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


def retained(before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> list[float]:
    """Returns, for each variable, the part of its old value that remains in the new one.

    A sum over batches retains all of it, 1; a moving average its momentum; a value that replaces the old one nothing.
    The rest of the new value may depend on anything else, other variables included.

    Args:
        before: the old values, distinct tensors of the graph under construction.
        after: the new value of each.

    Returns:
        Numbers from 0 to 1. They are 0, too, if the part is none, or differs between elements or batches.
    """
    factors = [_factor(new, old, dependents([old])) for old, new in zip(before, after, strict=True)]
    return [factor if factor is not None and 0 <= factor <= 1 else 0.0 for factor in factors]


def _factor(new: tf.Tensor, old: tf.Tensor, dependent: set[str]) -> float | None:
    """Returns the constant that the old value is multiplied with in a tensor; None if it is no constant."""
    if not tf.is_symbolic_tensor(new) or new.op.name not in dependent:
        return 0.0
    if new.op.name == old.op.name:
        return 1.0
    kind, operands = new.op.type, list(new.op.inputs)
    factors = {
        index: _factor(operand, old, dependent)
        for index, operand in enumerate(operands)
        if operand.op.name in dependent
    }
    if new.dtype == tf.bool or None in factors.values():
        return None
    return _combined(kind, operands, {index: factor for index, factor in factors.items() if factor is not None})


def _combined(kind: str, operands: Sequence[tf.Tensor], factors: dict[int, float]) -> float | None:
    """Returns the factor in an operation's result from those in the operands that depend on the old value."""
    one, other = factors.get(0, 0.0), factors.get(1, 0.0)
    if kind == "Mul" and len(factors) == 1:
        constant = _constant(operands[1 if 0 in factors else 0])
        return None if constant is None else constant * (one + other)
    if kind == "RealDiv" and 1 not in factors:
        constant = _constant(operands[1])
        return one / constant if constant else None
    if kind == "SelectV2" and 0 not in factors:
        choices = {factors.get(1, 0.0), factors.get(2, 0.0)}
        return choices.pop() if len(choices) == 1 else None
    if kind == "Sub":
        return one - other
    return sum(factors.values()) if factors.keys() <= set(_SUMMED_OPERANDS.get(kind, ())) else None


def _constant(tensor: tf.Tensor) -> float | None:
    """Returns the one number that all elements of a tensor are in every step, if there is one."""
    value = tf.get_static_value(tensor)
    different = [] if value is None else np.unique(value).tolist()
    return float(different[0]) if len(different) == 1 else None


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
