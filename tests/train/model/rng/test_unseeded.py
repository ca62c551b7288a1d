"""Draws without a seed: a step of a cluster starts where Keras's generator would be."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.train.model.rng.unseeded import draws_between, state_after


@pytest.mark.parametrize("draws", [0, 1, 2, 7])
def test_the_state_after_some_draws_is_that_of_keras(draws):
    generator = keras.random.SeedGenerator(987_654_321)
    before = keras.ops.convert_to_numpy(generator.state)
    for _ in range(draws):
        generator.next(ordered=False)
    after = state_after(tf.constant(before), tf.constant(draws, tf.int64))
    np.testing.assert_array_equal(after, generator.state)
    assert draws_between(before, np.asarray(after)) == draws


def test_states_after_many_draws_follow_each_other():
    state, many = tf.constant([5, 0], tf.int64), tf.constant(123_456_789_012, tf.int64)
    np.testing.assert_array_equal(
        state_after(state_after(state, many), tf.constant(1, tf.int64)), state_after(state, many + 1)
    )


class Noise(keras.layers.Layer):
    """Adds noise that has no seed."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x), stddev=0.1) if training else x


def noisy():
    network = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(3), Noise(), keras.layers.Dense(1)])
    network.compile("adam", "mse")
    return network


@pytest.mark.slow
def test_one_process_draws_what_keras_draws():
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    found = []
    for fit in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(4)
        model = noisy()
        fit(model, x, x[:, :1], 8, epochs=2, shuffle=False)
        found.append([*model.get_weights(), keras.ops.convert_to_numpy(keras.random.normal((3,)))])
    for ours, kerass in zip(*found, strict=True):
        np.testing.assert_allclose(ours, kerass, rtol=1e-5, atol=1e-6)
