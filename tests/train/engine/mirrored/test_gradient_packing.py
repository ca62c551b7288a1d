"""Replicas get the same sums, rounded to the wire's type if it is narrower."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.mirrored.gradient_packing import GradientPacking

SHAPES = [(2, 3), (4,), (3, 2), ()]
random = np.random.default_rng(0)
OWN, OTHERS = ([random.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(2))


def exchanged(wire, own, others, shapes=SHAPES):
    """The results of two replicas, and the types and sizes of the tensors that they sent."""
    sent = [_sent(GradientPacking(shapes, wire), gradients) for gradients in (own, others)]
    results = []
    for gradients in (own, others):
        pairs = zip(*sent, strict=True)
        results.append(GradientPacking(shapes, wire).sums(gradients, partial(_next_sum, pairs)))
    return results, [(values[0].dtype.name, sum(int(tf.size(value)) for value in values)) for values in sent[0]]


def _sent(packing, gradients):
    sent = []

    def keep(values):
        sent.append(values)
        return values

    packing.sums(gradients, keep)
    return sent


def _next_sum(pairs, _values):
    return [tf.add(own, others) for own, others in zip(*next(pairs), strict=True)]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_all_replicas_use_the_rounded_sums(wire):
    (mine, theirs), sent = exchanged(wire, [tf.constant(one) for one in OWN], [tf.constant(one) for one in OTHERS])
    dtype = tf.as_dtype(wire).as_numpy_dtype
    assert sent == [(wire, 6 + 4 + 6 + 1)]
    for a, b, one, other in zip(mine[0], theirs[0], OWN, OTHERS, strict=True):
        assert a.dtype == tf.float32
        assert a.shape == one.shape
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, (one.astype(dtype) + other.astype(dtype)).astype(np.float32))
    assert not mine[1]


def test_each_type_crosses_together_and_is_rounded_only_if_it_is_wider():
    own = [tf.constant(OWN[0], tf.float64), tf.constant(OWN[1], tf.float16), None, tf.constant(1.0)]
    (mine, _), sent = exchanged("bfloat16", own, own)
    assert sent == [("bfloat16", 6), ("float16", 4), ("bfloat16", 1)]
    assert [None if one is None else one.dtype.name for one in mine[0]] == ["float64", "float16", None, "float32"]


def test_a_float32_wire_leaves_float64_unchanged():
    own = [tf.constant(OWN[0], tf.float64)]
    (mine, _), sent = exchanged("float32", own, own, SHAPES[:1])
    assert sent == [("float64", 6)]
    np.testing.assert_array_equal(mine[0][0], 2 * own[0])


def test_sparse_gradients_are_summed_densely():
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([2, 3]))
    (mine, _), _ = exchanged("float16", [sparse], [sparse], SHAPES[:1])
    np.testing.assert_array_equal(mine[0][0], [[0, 0, 0], [4, 4, 4]])


def test_the_shapes_of_gradients_are_static_even_if_that_of_a_given_one_is_not():
    """The all-reduce divides them into parts."""
    summed = []

    def all_reduce(values):
        summed.extend(value.shape.as_list() for value in values)
        return values

    @tf.function(autograph=False)
    def sums(rows):
        sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.stack([rows, 3]))
        return GradientPacking(SHAPES[:2], "float32").sums([sparse, tf.ones([4])], all_reduce)[0]

    np.testing.assert_array_equal(sums(tf.constant(2))[0], [[0, 0, 0], [2, 2, 2]])
    assert summed == [[2, 3], [4]]


@pytest.mark.parametrize(
    ("wire", "value", "overflows"),
    [
        ("float16", 32000.0, False),
        ("float16", 33000.0, True),
        ("float16", -33000.0, True),
        ("bfloat16", 1e30, False),
        ("float32", 1e30, False),
    ],
)
def test_a_sum_beyond_the_range_of_float16_is_reported(wire, value, overflows):
    own = [tf.constant([0.0, value])]
    (mine, theirs), _ = exchanged(wire, own, own, [(2,)])
    assert bool(mine[1]) is bool(theirs[1]) is overflows


@pytest.mark.parametrize(("wire", "types"), [("float16", ["float16", "float32"]), ("bfloat16", ["bfloat16"])])
def test_squares_are_not_rounded_to_a_type_without_their_range(wire, types):
    packing = GradientPacking([(2,), (2,)], wire, squares=[1])
    sent = []

    def all_reduce(values):
        sent.append(values[0].dtype.name)
        return [2 * value for value in values]

    gradients = [tf.constant([1.0, -2.0]), tf.constant([1e-10, 4.0])]
    found, _ = packing.sums(gradients, all_reduce)
    assert sent == types
    np.testing.assert_allclose(found[1], [2e-10, 8.0], rtol=2.0**-8)
    assert packing.size(gradients) == 2 * sum(tf.as_dtype(each).size for each in [*types, *types][:2])


def test_infinite_float16_gradients_have_not_overflowed_on_the_wire():
    own = [tf.constant([np.inf], tf.float16)]
    (mine, _), _ = exchanged("float16", own, own, [(1,)])
    assert not mine[1]


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_reported_bytes_are_those_of_packed_gradients(wire):
    gradients = [OWN[0], None, *OWN[2:]]
    packing = GradientPacking(SHAPES, wire)
    tensors = [None if each is None else tf.constant(each) for each in gradients]
    summed = _sent(packing, tensors)
    assert packing.size(tensors) == sum(int(tf.size(value)) * value.dtype.size for values in summed for value in values)
