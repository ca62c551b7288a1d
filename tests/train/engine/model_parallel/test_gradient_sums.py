"""The gradients of micro-batches add up to that of the whole batch, by one product where this is smaller."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.model_parallel.gradient_sums import computed_alone, sum_gradients

PARTS = 4
LAYERS = {
    "matrix": (lambda: keras.layers.Dense(24), (20,)),
    "matrix of positions": (lambda: keras.layers.Dense(24), (3, 20)),
    "convolution": (lambda: keras.layers.Conv2D(32, 3), (3, 3, 32)),
    "depthwise convolution": (lambda: keras.layers.DepthwiseConv2D(3, depth_multiplier=16), (3, 3, 2)),
    "mixed precision": (lambda: keras.layers.Dense(64, dtype="mixed_bfloat16"), (48,)),
}
KERAS_3_12 = keras.__version__.startswith("3.12.")


def gradients_of(layer, x):
    """The gradients of a loss that differs from example to example."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        weights = [tf.convert_to_tensor(each.value) for each in layer.trainable_variables]
        tape.watch(weights)
        with keras.StatelessScope(list(zip(layer.trainable_variables, weights, strict=True))):
            loss = tf.reduce_sum(tf.cast(layer(x), tf.float32) ** 2)
    return tape.gradient(loss, weights)


def summed(layer, x):
    """The sums of the parts' gradients, and the names of the operations that compute them."""
    names = []

    @tf.function(autograph=False)
    def run(x):
        each = [gradients_of(layer, part) for part in tf.split(x, PARTS)]
        sums = [sum_gradients(own) for own in zip(*each, strict=True)]
        names.extend(operation.name for operation in tf.compat.v1.get_default_graph().get_operations())
        return sums

    return [tf.convert_to_tensor(each).numpy() for each in run(x)], [name for name in names if name.startswith("sum_")]


@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_one_product_of_all_examples_is_the_sum(build, shape):
    keras.utils.set_random_seed(1)
    layer, x = build(), np.random.default_rng(0).normal(size=(2 * PARTS, *shape)).astype(np.float32)
    layer(x)
    sums, products = summed(layer, tf.constant(x))
    assert products or (KERAS_3_12 and len(shape) == 2)  # it multiplies matrices of positions otherwise
    rounding = 2e-2 if layer.compute_dtype == "bfloat16" else 1e-5
    for own, whole in zip(sums, gradients_of(layer, tf.constant(x)), strict=True):
        np.testing.assert_allclose(own, whole, atol=rounding * np.abs(whole).max())


@pytest.mark.parametrize(
    ("layer", "x"),
    [(keras.layers.Dense(2), np.ones((64, 3), np.float32)), (keras.layers.Embedding(9, 2), np.arange(8) % 3)],
    ids=["more examples than weights", "rows of a table"],
)
def test_other_gradients_are_added(layer, x):
    layer(x)
    sums, products = summed(layer, tf.constant(x))
    assert not products
    for own, whole in zip(sums, gradients_of(layer, tf.constant(x)), strict=True):
        np.testing.assert_allclose(own, tf.convert_to_tensor(whole), rtol=1e-5)


def test_a_weight_that_is_used_twice_has_a_sum_of_products():
    dense = keras.layers.Dense(24)
    twice = keras.Sequential([keras.Input((24,)), dense, dense])
    x = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)
    sums, products = summed(twice, tf.constant(x))
    assert not products
    for own, whole in zip(sums, gradients_of(twice, tf.constant(x)), strict=True):
        np.testing.assert_allclose(own, whole, rtol=1e-4, atol=1e-4)


def test_what_is_computed_alone_does_not_include_the_product():
    layer = keras.layers.Dense(24)
    layer(np.ones((2, 20)))
    with tf.Graph().as_default():
        x = tf.zeros([2, 20])
        kernel, rows = tf.zeros([20, 24]), tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]))
        product = tf.raw_ops.MatMul(a=x, b=tf.zeros([2, 24]), transpose_a=True)
        assert computed_alone(tf.identity(product)) is product.op.inputs[1]
        assert computed_alone(kernel) is kernel
        assert computed_alone(rows) is rows.values
