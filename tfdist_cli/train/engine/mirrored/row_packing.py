"""Packs the gradients of tables as rows, gathers those of all replicas, and sums the rows with the same number.

The rows of all tables of a width and a type cross in one message, numbered as if their tables were concatenated. Each
replica adds up the same rows in the order of the ranks, so that all have the same sums to the bit.

If the update takes the square of each term of a row (see `optimizers/terms.py`), a replica also sends the sum of the
squares for rows that it has looked up several times. The number of all rows is added to the number of such a row's sum,
and twice to that of its squares, which cross as a root, and are rounded like a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist_cli.spec.sections.updates import WireType
from tfdist_cli.train.optimizers.row_sums import row_sums
from tfdist_cli.train.optimizers.terms import SummedTerms, Terms

Gather = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Numbers, shape (n,), and rows, shape (n, width), of a replica → those of all replicas, the same on each of them."""


@dataclass(frozen=True)
class TableGradient:
    """A replica's gradient of a table.

    Args:
        slices: its rows.
        shape: the table's shape.
        distinct: whether each row occurs once.
        terms: what the update takes of each term of a row, beside their sum; None: nothing.
    """

    slices: tf.IndexedSlices
    shape: tuple[int, ...]
    distinct: bool
    terms: Terms | None = None

    @property
    def width(self) -> int:
        """The numbers in a row."""
        return int(np.prod(self.shape[1:]))


class RowPacking:
    """Packs, rounds, gathers and sums rows.

    Args:
        wire: the type in which float32 and float64 rows cross; `float32` leaves both unchanged.
        gather: gathers the rows of all replicas.
    """

    def __init__(self, wire: WireType, gather: Gather) -> None:
        self._wire = None if wire == "float32" else tf.as_dtype(wire)
        self._gather = gather
        self.bytes: tf.Tensor | int = 0
        """What this replica has sent to each other one."""
        self.overflow = tf.constant(False)
        """Whether a row exceeds the range of float16."""

    def sums(self, gradients: Sequence[TableGradient]) -> list[tf.IndexedSlices | SummedTerms]:
        """Returns the sums over all replicas, of which each row occurs once.

        Args:
            gradients: this replica's, one of each table, already divided by the number of replicas.
        """
        groups: dict[tuple[int, tf.DType, Terms | None], list[int]] = {}
        for index, each in enumerate(gradients):
            groups.setdefault((each.width, each.slices.values.dtype, each.terms), []).append(index)
        found: dict[int, tf.IndexedSlices | SummedTerms] = {}
        for members in groups.values():
            found |= zip(members, self._sums_of_group([gradients[index] for index in members]), strict=True)
        return [found[index] for index in range(len(gradients))]

    def _sums_of_group(self, gradients: list[TableGradient]) -> list[tf.IndexedSlices | SummedTerms]:
        """The sums of tables with the same width, type and terms."""
        ends = np.cumsum([each.shape[0] for each in gradients])
        dtype, width, terms = gradients[0].slices.values.dtype, gradients[0].width, gradients[0].terms
        counted = tf.int32 if ends[-1] * (3 if terms else 1) <= tf.int32.max else tf.int64
        firsts = [0, *ends[:-1]]
        numbers, rows = _joined(
            [
                (tf.cast(each.slices.indices, counted) + int(first), tf.reshape(each.slices.values, [-1, width]))
                for each, first in zip(gradients, firsts, strict=True)
            ]
        )
        if terms:
            numbers, rows = _with_terms(numbers, rows, int(ends[-1]), terms)
        elif not all(each.distinct for each in gradients):
            numbers, rows = _sums_of_equal(numbers, rows)
        narrow = self._wire if self._wire and self._wire.size < dtype.size else dtype
        rows = tf.cast(rows, narrow)
        self.bytes += tf.size(numbers) * (counted.size + width * narrow.size)
        numbers, rows = self._gather(numbers, rows)
        if narrow == tf.float16 != dtype:
            self.overflow |= ~tf.reduce_all(tf.math.is_finite(rows))
        rows = tf.cast(rows, dtype)
        if terms:
            numbers, rows = _sums_with_terms(numbers, rows, int(ends[-1]), terms)
        else:
            numbers, rows = _sums_of_equal(numbers, rows)
        by_table = zip(gradients, firsts, _by_table(numbers, rows, ends), strict=True)
        return [_gradient(each, own_numbers - int(first), own) for each, first, (own_numbers, own) in by_table]


def _gradient(table: TableGradient, numbers: tf.Tensor, rows: tf.Tensor) -> tf.IndexedSlices | SummedTerms:
    """The gradient of a table; with terms, they are behind the sum in each row."""
    shape = [-1, *table.shape[1:]]
    values, *more = tf.split(rows, 2, axis=1) if table.terms else [rows]
    total = tf.IndexedSlices(tf.reshape(values, shape), numbers, tf.constant(table.shape))
    return SummedTerms(total, tf.reshape(more[0], shape), table.terms) if table.terms else total


def _joined(parts: list[tuple[tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
    if len(parts) == 1:
        return parts[0]
    numbers, rows = zip(*parts, strict=True)
    return tf.concat(numbers, axis=0), tf.concat(rows, axis=0)


def _sums_of_equal(numbers: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the rows with the same number, in their order."""
    distinct, where = tf.unique(numbers)
    return distinct, row_sums([rows], where, tf.size(distinct))[0]


def _with_terms(numbers: tf.Tensor, rows: tf.Tensor, span: int, terms: Terms) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the rows with the same number, and what the update takes of each if there are several.

    Args:
        numbers: the numbers, below `span`.
        rows: the rows.
        span: the rows of all tables.
        terms: what the update takes.
    """
    distinct, where, counts = tf.unique_with_counts(numbers)
    repeated = tf.cast(tf.where(counts > 1)[:, 0], tf.int32)
    sums, each = row_sums([rows, terms.of(rows)], where, tf.size(distinct))
    marked = distinct + span * tf.cast(counts > 1, distinct.dtype)
    numbers = tf.concat([marked, tf.gather(distinct, repeated) + 2 * span], axis=0)
    return numbers, tf.concat([sums, terms.root(tf.gather(each, repeated))], axis=0)


def _sums_with_terms(numbers: tf.Tensor, rows: tf.Tensor, span: int, terms: Terms) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums what `_with_terms` has returned on all replicas; returns the sums of terms behind those of rows."""
    kind = (numbers // span)[:, None]
    distinct, where = tf.unique(numbers % span)
    none = tf.zeros_like(rows)
    both = tf.concat([tf.where(kind == 2, none, rows), tf.where(kind == 1, none, terms.of(rows))], axis=1)
    return distinct, row_sums([both], where, tf.size(distinct))[0]


def _by_table(numbers: tf.Tensor, rows: tf.Tensor, ends: np.ndarray) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Splits rows among the tables that end at some numbers."""
    if len(ends) == 1:
        return [(numbers, rows)]
    tables = tf.raw_ops.UpperBound(sorted_inputs=tf.constant(ends[None, :-1], numbers.dtype), values=numbers[None])[0]
    parts = (tf.dynamic_partition(each, tables, len(ends)) for each in (numbers, rows))
    return list(zip(*parts, strict=True))
