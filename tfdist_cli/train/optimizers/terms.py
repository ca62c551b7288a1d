"""Gradients that are sums of terms: of the lookups of a row, Keras gives the optimizer each gradient by itself.

Keras passes the gradient of an `Embedding` to the optimizer as `tf.IndexedSlices`, in which a row occurs as often as a
batch looks it up. An optimizer that squares gradients squares each of these terms, and adds up the squares. An update
with the sum of the terms and the sum of their squares is the same. Workers send these two sums, whose size does not
depend on how often a row is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.train.optimizers.row_sums import row_sums
from tfdist_cli.train.variables.sharding import Gradient, split_rows


@dataclass(frozen=True)
class Terms:
    """What an update takes of each term of a gradient, beside the sum of the terms.

    Args:
        of: the function of a term whose results are summed.
        degree: f(c·x) is c to this power times f(x), for c > 0.
    """

    of: Callable[[tf.Tensor], tf.Tensor]
    degree: int

    def root(self, values: tf.Tensor) -> tf.Tensor:
        """Returns a term whose f is `values`: it has the range of a gradient, and can be rounded like one."""
        return tf.sqrt(values) if self.degree == 2 else values

    def scale(self, factor: tf.Tensor | float) -> tf.Tensor | float:
        """Returns what f is multiplied by if each term is multiplied by a factor."""
        return factor**self.degree


SQUARES = Terms(tf.square, 2)
SIZES = Terms(tf.abs, 1)


@dataclass(frozen=True)
class SummedTerms:
    """A gradient that is a sum of terms.

    Args:
        total: the sum: a tensor, or `tf.IndexedSlices` with distinct rows.
        terms: the sum of what the update takes of each term, of the shape of the values of `total`.
        kind: what that is.
    """

    total: tf.Tensor | tf.IndexedSlices
    terms: tf.Tensor
    kind: Terms

    @property
    def values(self) -> tf.Tensor:
        """The values of the sum."""
        return self.total.values if isinstance(self.total, tf.IndexedSlices) else self.total

    def with_values(self, values: tf.Tensor, terms: tf.Tensor) -> SummedTerms:
        """Returns the same rows with other values."""
        if isinstance(self.total, tf.IndexedSlices):
            return SummedTerms(tf.IndexedSlices(values, self.total.indices, self.total.dense_shape), terms, self.kind)
        return SummedTerms(values, terms, self.kind)

    def divided(self, by: tf.Tensor | float) -> SummedTerms:
        """Divides each term by a number."""
        by = tf.cast(by, self.values.dtype)
        return self.with_values(self.values / by, self.terms / self.kind.scale(by))

    def repeated(self) -> tf.IndexedSlices:
        """Returns a few terms with the same sums, for Keras's own updates: `tf.IndexedSlices` in which rows repeat.

        For squares, k equal terms have the smallest sum of squares that k terms with this sum can have. The rest of the
        sum of squares comes from ±δ in the first two of them. For sizes, two terms are always enough.
        """
        values, terms = self.values, tf.maximum(self.terms, 0)
        rows = self.total.indices if isinstance(self.total, tf.IndexedSlices) else tf.range(tf.shape(values)[0])
        others = list(range(1, values.shape.rank))
        if self.kind.degree == 1:
            counts = tf.fill(tf.shape(rows), 2)
        else:
            needed = tf.math.ceil(tf.math.divide_no_nan(tf.square(values), terms) * (1 - 1e-5))
            single = tf.reduce_all(tf.abs(terms - tf.square(values)) <= 1e-6 * terms, axis=others)
            counts = tf.where(single, 1, tf.maximum(tf.cast(tf.reduce_max(needed, axis=others), tf.int32), 2))
        source = tf.repeat(tf.range(tf.size(rows)), counts)
        number = tf.range(tf.size(source)) - tf.gather(tf.cumsum(counts, exclusive=True), source)
        shape = tf.concat([[-1], tf.ones([len(others)], tf.int32)], axis=0)
        sign = tf.cast(tf.gather([1, -1, 0], tf.minimum(number, 2)), values.dtype)
        count = tf.cast(tf.reshape(counts, shape), values.dtype)
        mean = values / count
        if self.kind.degree == 1:
            spread = terms / 2  # at least half of the sum: the terms have different signs
        else:
            spread = tf.where(count > 1, tf.sqrt(tf.maximum(terms - tf.square(values) / count, 0) / 2), 0.0)
        repeated = tf.gather(mean, source) + tf.reshape(sign, shape) * tf.gather(spread, source)
        return tf.IndexedSlices(repeated, tf.gather(rows, source), self._shape())

    def _shape(self) -> tf.Tensor:
        return self.total.dense_shape if isinstance(self.total, tf.IndexedSlices) else tf.shape(self.values)


def summed_terms(slices: tf.IndexedSlices, kind: Terms, rows: int | tf.Tensor) -> SummedTerms:
    """Sums the terms of the rows of a table, or of what has been fetched of it.

    Args:
        slices: the terms.
        kind: what the update takes of each of them.
        rows: the number of rows.
    """
    total, terms = row_sums([slices.values, kind.of(slices.values)], slices.indices, rows)
    return SummedTerms(total, terms, kind)


def whole_table(rows: tf.IndexedSlices | SummedTerms) -> tf.Tensor | SummedTerms:
    """Returns the gradient of a whole table from that of some rows."""
    if not isinstance(rows, SummedTerms):
        return tf.convert_to_tensor(rows)
    total, terms = rows.total, rows.terms
    if not isinstance(total, tf.IndexedSlices):
        return rows
    terms = tf.IndexedSlices(terms, total.indices, total.dense_shape)
    return SummedTerms(tf.convert_to_tensor(total), tf.convert_to_tensor(terms), rows.kind)


def tensors_of(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the tensors of gradients: of each its values, and the sums of terms."""
    found = []
    for each in gradients:
        if isinstance(each, SummedTerms):
            found += [each.values, each.terms]
        elif each is not None:
            found.append(each.values if isinstance(each, tf.IndexedSlices) else each)
    return found


def split_gradient(gradient: Any, shards: Sequence[Any], kind: Terms | None) -> Gradient:
    """Splits the gradient of a whole variable into those of its shards.

    Args:
        gradient: a tensor, or `tf.IndexedSlices` whose rows may repeat.
        shards: the variables that store the variable.
        kind: what the update takes of each term, if it has terms.
    """
    if kind is None or not isinstance(gradient, tf.IndexedSlices):
        return split_rows(tf.convert_to_tensor(gradient), shards)
    whole = summed_terms(gradient, kind, sum(int(shard.shape[0]) for shard in shards))
    pairs = zip(split_rows(whole.values, shards), split_rows(whole.terms, shards), strict=True)
    return [SummedTerms(total, terms, kind) for total, terms in pairs]


def joined(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Returns the mean of gradients whose terms stay separate.

    Args:
        parts: the gradients of some batches.
    """
    values, indices = (tf.concat(each, axis=0) for each in zip(*((p.values, p.indices) for p in parts), strict=True))
    return tf.IndexedSlices(values / tf.cast(len(parts), values.dtype), indices, parts[0].dense_shape)
