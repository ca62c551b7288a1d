"""Updates with the sums of a gradient's terms equal Keras's updates with the terms."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.compare import difference
from tests.support.optimizers import OPTIMIZERS, optimizers
from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.optimizers.apply import apply, disable_gradient_reduction, terms_taken
from tfdist_cli.train.optimizers.registry import fused
from tfdist_cli.train.optimizers.terms import SIZES, SQUARES, SummedTerms, joined, summed_terms
from tfdist_cli.train.variables.sharding import parts

ROWS = [0, 2, 0, 5, 0, 2, 6]
SHAPE = 7, 3
STEPS = 6
ALSO = {
    "rmsprop without momentum": lambda: optimizers.RMSprop(0.01, centered=True),
    "rmsprop with momentum": lambda: optimizers.RMSprop(0.01, momentum=0.5),
    "ftrl with all terms": lambda: optimizers.Ftrl(
        0.1,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.1,
        l2_shrinkage_regularization_strength=0.1,
        beta=0.1,
    ),
    "adagrad and a norm": lambda: optimizers.Adagrad(0.1, clipnorm=0.5),
    "adagrad and a global norm": lambda: optimizers.Adagrad(0.1, global_clipnorm=0.5),
    "adam and an average": lambda: optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
}
NAMES = [name for name in [*OPTIMIZERS, *ALSO] if name not in ("loss scale", "clipvalue")]


def slices(step):
    values = np.random.default_rng(step).normal(size=(len(ROWS), SHAPE[1])).astype(np.float32)
    return tf.IndexedSlices(tf.constant(values), tf.constant(ROWS), tf.constant(SHAPE))


def variables():
    table, bias = keras.Variable("zeros", shape=SHAPE, name="kernel"), keras.Variable([0.5, -0.25], name="bias")
    table.assign(np.linspace(-1, 1, 21, dtype=np.float32).reshape(SHAPE))
    return [table, bias]


def trained(optimizer, update):
    found = variables()
    optimizer.build(found)

    @tf.function(autograph=False)
    def one(values, bias):
        scale = optimizer.scale_loss(tf.constant(1.0))
        update(optimizer, tf.IndexedSlices(values * scale, tf.constant(ROWS), tf.constant(SHAPE)), bias * scale, found)

    for step in range(STEPS):
        one(slices(step).values, tf.constant([0.1, -0.2 * step]))
    return found, optimizer


def by_keras(optimizer, rows, bias, found):
    optimizer.apply([rows, bias], found)


def sums(optimizer, rows, found):
    kind = terms_taken(optimizer, found).get(0)
    if kind is None:
        return None
    return summed_terms(rows, kind, SHAPE[0])


def by_sums(optimizer, rows, bias, found):
    whole, shards = sums(optimizer, rows, found), parts(found[0])
    sizes = [part.shape[0] for part in shards]
    if whole is None:
        pieces = tf.split(tf.convert_to_tensor(rows), sizes)
    else:
        each = zip(tf.split(whole.total, sizes), tf.split(whole.terms, sizes), strict=True)
        pieces = [SummedTerms(*own, whole.kind) for own in each]
    apply(optimizer, [pieces, [bias]], found)


def by_few_terms(optimizer, rows, bias, found):
    whole = sums(optimizer, rows, found)
    optimizer.apply([tf.convert_to_tensor(rows) if whole is None else whole.repeated(), bias], found)


def assert_equal(ours, plain):
    assert difference(ours[0], plain[0]) < 5e-6
    assert difference(ours[1].variables, plain[1].variables) < 2e-5


@pytest.mark.rotates(5)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.filterwarnings("ignore:Converting sparse IndexedSlices")
@pytest.mark.parametrize("name", NAMES)
def test_updates_equal_those_of_keras_with_rows_that_occur_several_times(name, servers):
    make = {**OPTIMIZERS, **ALSO}[name]
    keras.utils.set_random_seed(3)
    plain = trained(make(), by_keras)
    assert_equal(trained(make(), by_few_terms), plain)
    for count in (1, 3):
        with servers(count, shard=ShardRule(min_bytes=80)).scope():
            optimizer = make()
            disable_gradient_reduction(optimizer)
            ours = trained(optimizer, by_sums)
        assert len(parts(ours[0][0])) == count
        assert_equal(ours, plain)


@pytest.mark.parametrize("name", ["adagrad", "adam", "rmsprop", "adamax"])
def test_the_update_of_keras_takes_them(name):
    plain = trained(OPTIMIZERS[name](), by_keras)

    def update(optimizer, rows, bias, found):
        whole = sums(optimizer, rows, found)
        with fused(optimizer, terms={id(found[0]): whole.terms}):
            optimizer.apply([whole.total, bias], found)

    assert_equal(trained(OPTIMIZERS[name](), update), plain)


def test_some_rows_are_updated_by_their_sums():
    plain = trained(optimizers.Adagrad(0.1), by_keras)

    def update(optimizer, rows, bias, found):
        whole, own = sums(optimizer, rows, found), tf.constant([6, 0, 5, 2])
        given = tf.IndexedSlices(tf.gather(whole.total, own), own, tf.constant(SHAPE))
        apply(optimizer, [[SummedTerms(given, tf.gather(whole.terms, own), SQUARES)], [bias]], found)

    assert_equal(trained(optimizers.Adagrad(0.1), update), plain)


TAKEN = {
    "sgd": None,
    "nesterov": None,
    "lion": None,
    "adam": SQUARES,
    "adagrad": SQUARES,
    "adamax": SIZES,
    "nadam": SQUARES,
    "global clipnorm": SQUARES,
    "accumulation": None,
    "loss scale": None,
}


@pytest.mark.parametrize("name", TAKEN)
def test_only_optimizers_that_are_not_linear_take_more_than_the_sum(name):
    optimizer, found = OPTIMIZERS[name](), variables()
    optimizer.build(found)
    expected = {} if TAKEN[name] is None else dict.fromkeys(range(2), TAKEN[name])
    assert terms_taken(optimizer, found) == expected


@pytest.mark.parametrize("kind", [SQUARES, SIZES])
def test_few_terms_have_the_same_sums(kind):
    whole = summed_terms(slices(1), kind, SHAPE[0])
    few = whole.repeated()
    again = summed_terms(few, kind, SHAPE[0])
    np.testing.assert_allclose(again.total, whole.total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(again.terms, whole.terms, rtol=1e-5, atol=1e-6)
    counts = np.bincount(few.indices.numpy(), minlength=SHAPE[0])
    if kind is SQUARES:
        assert (counts <= np.maximum(np.bincount(ROWS, minlength=SHAPE[0]), 1)).all()


def test_equal_terms_stay_as_many():
    rows = tf.IndexedSlices(tf.ones([9, 2]), tf.constant([3] * 9), tf.constant([5, 2]))
    few = summed_terms(rows, SQUARES, 5).repeated()
    own = few.values.numpy()[few.indices.numpy() == 3]
    np.testing.assert_allclose(own, np.ones([9, 2]), atol=3e-3)
    np.testing.assert_allclose(np.square(own).sum(axis=0), [9, 9], rtol=2e-5)


def test_division_by_a_number_divides_each_term():
    for kind in (SQUARES, SIZES):
        whole, given = summed_terms(slices(1), kind, SHAPE[0]), slices(1)
        divided = whole.divided(4.0)
        each = tf.IndexedSlices(given.values / 4, given.indices, given.dense_shape)
        np.testing.assert_allclose(divided.terms, summed_terms(each, kind, SHAPE[0]).terms, rtol=1e-6)
        np.testing.assert_allclose(kind.of(kind.root(whole.terms)), whole.terms, rtol=1e-6)


def test_the_mean_of_batches_keeps_their_terms_apart():
    mean = joined([slices(1), slices(2)])
    assert mean.indices.numpy().tolist() == ROWS + ROWS
    expected = (tf.convert_to_tensor(slices(1)) + tf.convert_to_tensor(slices(2))) / 2
    np.testing.assert_allclose(tf.convert_to_tensor(mean), expected, rtol=1e-6)
