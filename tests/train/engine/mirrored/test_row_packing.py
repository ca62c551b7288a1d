"""Replicas get the same sums of rows, rounded to the wire's type if it is narrower."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.mirrored.row_packing import RowPacking, TableGradient
from tfdist_cli.train.optimizers.terms import SIZES, SQUARES, tensors_of, whole_table

SHAPES = [(6, 2), (9, 3), (5, 2)]
random = np.random.default_rng(0)


def gradient(table, rows, scale=1.0, dtype=tf.float32, terms=None):
    values = tf.constant(scale * random.normal(size=(len(rows), SHAPES[table][1])), dtype)
    slices = tf.IndexedSlices(values, tf.constant(rows, tf.int64))
    return TableGradient(slices, SHAPES[table], distinct=len(set(rows)) == len(rows), terms=terms)


def whole(each, rounded=tf.float32):
    """The gradient as a table; the sum of a row is rounded before it crosses."""
    table = np.zeros(each.shape, np.float64)
    np.add.at(table, each.slices.indices.numpy(), each.slices.values.numpy().astype(np.float64))
    return tf.cast(tf.constant(table, each.slices.values.dtype), rounded).numpy().astype(np.float64)


def sums(wire, *replicas):
    """The sums of each replica as tables, and its packing."""
    sent = []

    def keep(numbers, rows):
        sent[-1].append((numbers, rows))
        return numbers, rows

    for own in replicas:
        sent.append([])
        RowPacking(wire, keep).sums(own)

    def next_rows(groups, numbers, rows):
        return tuple(tf.concat(parts, axis=0) for parts in zip(*next(groups), strict=True))

    packings = [RowPacking(wire, partial(next_rows, iter(list(zip(*sent, strict=True))))) for _ in replicas]
    found = [packing.sums(own) for packing, own in zip(packings, replicas, strict=True)]
    for slices in (getattr(each, "total", each) for one in found for each in one):
        assert len(set(slices.indices.numpy())) == len(slices.indices)
    return [[np.array(tensors_of([whole_table(each)])) for each in one] for one in found], packings


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_all_replicas_have_the_sums_of_each_table(wire):
    own = [gradient(0, [5, 0, 5]), gradient(1, [8]), gradient(2, [])]
    others = [gradient(0, [0, 3]), gradient(1, [8, 8, 2]), gradient(2, [4, 4])]
    found, _ = sums(wire, own, others, own)
    for one in found:
        for (result,), a, b in zip(one, own, others, strict=True):
            exact = 2 * whole(a, tf.as_dtype(wire)) + whole(b, tf.as_dtype(wire))
            np.testing.assert_allclose(result, exact, rtol=1e-6, atol=1e-6)
    assert len({b"".join(table.tobytes() for table in one) for one in found}) == 1


def terms_of(each):
    """What an update takes of each term of a gradient, as a table."""
    table = np.zeros(each.shape, np.float64)
    np.add.at(table, each.slices.indices.numpy(), each.terms.of(each.slices.values).numpy().astype(np.float64))
    return table


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", [SQUARES, SIZES])
def test_all_replicas_have_the_sums_of_terms(kind, wire):
    """Of tables that share a message, and of one whose update takes the sum alone."""
    scale = 1e-3  # the squares are below the range of float16
    own = [
        gradient(0, [5, 0, 5, 5], scale, terms=kind),
        gradient(1, [8, 8], scale),
        gradient(2, [4], scale, terms=kind),
    ]
    others = [gradient(0, [0, 3], scale, terms=kind), gradient(1, [8], scale), gradient(2, [], terms=kind)]
    found, _ = sums(wire, own, others, own)
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}[wire]
    for one in found:
        for result, a, b in zip(one, own, others, strict=True):
            np.testing.assert_allclose(result[0], 2 * whole(a) + whole(b), rtol=rounding, atol=10 * rounding * scale)
            if a.terms:
                np.testing.assert_allclose(result[1], 2 * terms_of(a) + terms_of(b), rtol=2 * rounding, atol=1e-12)
    assert [len(result) for result in found[0]] == [2, 1, 2]
    assert len({b"".join(table.tobytes() for table in one) for one in found}) == 1


def test_only_rows_that_repeat_are_sent_twice():
    own = [gradient(0, [5, 0, 5, 5, 2], terms=SQUARES)]
    _, (packing, _) = sums("float32", own, own)
    assert int(packing.bytes) == 4 * (4 + 2 * 4)


def test_types_and_widths_cross_apart_and_keep_their_types():
    own = [gradient(0, [1], dtype=tf.float64), gradient(1, [2, 3]), gradient(2, [0])]
    (one, _), (packing, _) = sums("bfloat16", own, own)
    assert [table.dtype.name for table in one] == ["float64", "float32", "float32"]
    assert int(packing.bytes) == (4 + 2 * 2) + 2 * (4 + 3 * 2) + (4 + 2 * 2)


@pytest.mark.parametrize(
    ("wire", "value", "overflows"), [("float16", 7e4, True), ("float16", 6e4, False), ("bfloat16", 7e4, False)]
)
def test_a_row_beyond_the_range_of_float16_is_reported(wire, value, overflows):
    slices = tf.IndexedSlices(tf.constant([[value, 0.0]]), tf.constant([1]))
    _, packings = sums(wire, *[[TableGradient(slices, (6, 2), distinct=True)]] * 2)
    assert [bool(packing.overflow) for packing in packings] == [overflows] * 2


def test_more_rows_than_an_int32_counts():
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([7]))
    tables = [TableGradient(slices, (2**31, 1), distinct=True), TableGradient(slices, (9, 1), distinct=True)]
    found = RowPacking("float32", lambda *own: own).sums(tables)
    assert [each.indices.numpy().tolist() for each in found] == [[7], [7]]
