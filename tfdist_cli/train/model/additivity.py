"""Whether what metrics count is a sum over batches: read off the graph that counts it.

What executions and workers count, each from the start, can be added up if a step adds to a variable something that
follows from its batch alone. Numbers that are made up cannot tell: a maximum is a sum as long as none is exceeded. The
graph can, and nothing need be run for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_CARRIES: dict[str, Sequence[int]] = {
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
"""By the type of an operation: of which of its operands the result is the sum with what follows from the others."""


def adds_up(before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> list[bool]:
    """For each value after a step whether it is the one before it, plus something that no value before has part in.

    Args:
        before: tensors of a graph that is being built, each another one.
        after: one for each.
    """
    depends = _reached_from(before)
    return [_is_sum(new, old, depends) for old, new in zip(before, after, strict=True)]


def _is_sum(new: tf.Tensor, old: tf.Tensor, depends: set[str]) -> bool:
    while tf.is_symbolic_tensor(new) and new.op.name != old.op.name:
        operation = new.op
        if operation.type == "SelectV2":
            condition, *choices = operation.inputs
            return condition.op.name not in depends and all(_is_sum(choice, old, depends) for choice in choices)
        places = [place for place, operand in enumerate(operation.inputs) if operand.op.name in depends]
        if len(places) != 1 or places[0] not in _CARRIES.get(operation.type, ()):
            return False
        new = operation.inputs[places[0]]
        if new.dtype == tf.bool:
            return False
    return tf.is_symbolic_tensor(new)


def _reached_from(tensors: Sequence[tf.Tensor]) -> set[str]:
    """The names of the operations that have part of any of `tensors`, those that made them included."""
    operations = [tensor.op for tensor in tensors]
    reached = {operation.name for operation in operations}
    while operations:
        for output in operations.pop().outputs:
            new = [consumer for consumer in output.consumers() if consumer.name not in reached]
            reached.update(consumer.name for consumer in new)
            operations += new
    return reached
