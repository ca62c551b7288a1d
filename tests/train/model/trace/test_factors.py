"""Gradients of matrices that a batch is multiplied by have factors."""

import keras
import pytest
import tensorflow as tf

from tfdist_cli.train.model.trace.factors import factors_of

WEIGHT = (6, 4)


def found(call, batch=(3, 6), weight=WEIGHT):
    """Whether the gradient has factors, their shapes, and the gradient and the product of the factors."""
    result = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(batch), tf.TensorSpec(weight)])
    def gradient_of(x, weight):
        with tf.GradientTape() as tape:
            tape.watch(weight)
            loss = tf.reduce_sum(tf.square(call(x, weight)))
        gradient = tape.gradient(loss, weight)
        factors = factors_of(gradient)
        result.append(factors and [each.shape.as_list() for each in factors])
        return gradient, tf.matmul(*factors, transpose_a=True) if factors else gradient

    known = [3 if each is None else each for each in batch]
    gradient, product = gradient_of(tf.random.stateless_normal(known, [1, 2]), tf.ones(weight))
    tf.debugging.assert_equal(gradient, product)
    return result[0]


def test_a_product_with_a_batch_has_factors():
    assert found(tf.matmul) == [[3, 6], [3, 4]]
    assert found(lambda x, weight: tf.nn.relu(x @ weight) + 1.0) == [[3, 6], [3, 4]]


def test_a_product_with_the_transposed_weight_has_factors():
    assert found(lambda x, weight: tf.matmul(x, weight, transpose_b=True), batch=(3, 4)) == [[3, 6], [3, 4]]


def test_each_position_of_a_sequence_is_an_example():
    assert found(lambda x, weight: tf.reshape(x, [-1, 6]) @ weight, batch=(3, 5, 6)) == [[15, 6], [15, 4]]


@pytest.mark.parametrize(
    ("call", "batch"),
    [
        (tf.matmul, (None, 6)),  # so many examples as a batch has
        (lambda x, weight: x @ weight + x @ tf.square(weight), (3, 6)),
        (lambda x, weight: x @ weight * tf.reduce_sum(weight), (3, 6)),
        (lambda x, weight: x @ tf.cast(tf.cast(weight, tf.bfloat16), tf.float32), (3, 6)),
        (lambda x, weight: tf.gather(weight, tf.cast(x[:, 0], tf.int32)), (3, 6)),
        (lambda x, weight: tf.matmul(x, weight, transpose_a=True), (6, 3)),
    ],
)
def test_other_gradients_have_none(call, batch):
    assert found(call, batch) is None


def test_what_is_no_gradient_has_none():
    assert factors_of(None) is None
    assert factors_of(tf.ones([2, 2])) is None  # not in a function


def test_dense_layers_of_keras_have_factors():
    layer = keras.layers.Dense(4, activation="relu")
    layer.build([3, 6])

    def call(x, weight):
        return layer.stateless_call([weight, layer.bias.value], [], x)[0]

    assert found(call) == [[3, 6], [3, 4]]
