"""Decides from a step's graph in which gradients of tables each example has terms of its own.

The gradient of a table has a row for each lookup. If the ids are values of the batch, a batch twice as large has twice
as many rows: a row of the table may occur several times. But if the ids depend on shapes alone, as positions in a
sequence do, a larger batch looks up the same rows once, and their gradients are sums over more examples. So it is with
ids that are made distinct before they are looked up, as TensorFlow does with sparse ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_DISTINCT = (
    *("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
    *("SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2"),
)


def rows_of_examples(rows: tf.Tensor, batch: Sequence[tf.Tensor]) -> bool:
    """Whether the rows of a gradient are values of the batch.

    Args:
        rows: the rows, of the graph under construction.
        batch: the tensors of the batch.
    """
    given = {tensor.op.name for tensor in batch}
    found, operations = {rows.op.name}, [rows.op]
    while operations:
        operation = operations.pop()
        if operation.name in given:
            return True
        if operation.type in (*_SHAPES, *_DISTINCT):
            continue
        new = [tensor.op for tensor in operation.inputs if tensor.op.name not in found]
        found.update(each.name for each in new)
        operations += new
    return False
