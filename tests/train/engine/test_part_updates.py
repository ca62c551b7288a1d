"""Which parameters workers of one host divide, and how."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.compare import batches, classes, classifier
from tfdist_cli.train.cluster.shared_memory.lockstep import words
from tfdist_cli.train.cluster.shared_memory.lockstep.factors import Factors
from tfdist_cli.train.engine import part_updates
from tfdist_cli.train.engine.part_updates import PartUpdates
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import stored_parameters

WHOLE = tf.data.Dataset.from_tensor_slices(classes(48)).batch(8, drop_remainder=True)


def step_of(*layers, optimizer="adam", data=WHOLE, **compiled):
    step = ModelStep(classifier(*layers, optimizer=optimizer, **compiled))
    step.build(data.element_spec)
    return step


def updates_of(step, own, data=WHOLE, workers=2):
    return PartUpdates(step, data.element_spec, stored_parameters(step.optimizer, step.parameters), own, workers)


def test_parameters_are_divided_among_the_memories():
    step = step_of(keras.layers.Dense(64), keras.layers.Dense(16))
    updates = updates_of(step, [[0, 3, 4], [1, 2, 5]])
    assert [[array.size for array in own] for own in updates.arrays] == [[5 * 64, 16, 16 * 3], [64, 64 * 16, 3]]
    assert updates.slots == 2
    # The factors of the first kernel have more than twice its values.
    assert updates.factors == {(1, 1): Factors(8, 64, 16, 2, 4)}


def test_batches_of_any_size_have_no_factors():
    step = step_of(keras.layers.Dense(64), keras.layers.Dense(16), data=batches())
    assert updates_of(step, [range(6)], batches()).factors == {}


def test_factors_are_sent_behind_the_other_gradients():
    """In the order of the memories."""
    step = step_of(keras.layers.Dense(64), keras.layers.Dense(16))
    updates = updates_of(step, [[2, 0], [5, 4, 3, 1]])
    names = []

    @tf.function(autograph=False)
    def sent(x, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum((x @ weights[0] + weights[1]) @ weights[2] @ weights[4])
            loss += tf.reduce_sum(weights[3]) + tf.reduce_sum(weights[5])
        gradients = tape.gradient(loss, weights)
        summed = updates.summed(gradients)
        names.extend(number for number, each in enumerate(summed) if each is None)
        found = updates.sent(gradients, summed)
        return found, [gradients[number] for number in (0, 5, 4, 3, 1)], gradients[2]

    shapes = [variable.shape for variable in step.parameters]
    found, summed, gradient = sent(tf.ones([8, 5]), *(tf.random.stateless_normal(shape, [1, 2]) for shape in shapes))
    assert names == [2]
    for one, other in zip(found[:5], summed, strict=True):
        tf.debugging.assert_equal(one, other)
    np.testing.assert_allclose(tf.matmul(*found[5:], transpose_a=True), gradient, rtol=1e-5)


@pytest.mark.parametrize(("size", "workers", "worth_it"), [(8192, 2, True), (8191, 2, False), (8192, 3, False)])
def test_small_parameters_are_not_worth_it(size, workers, worth_it):
    assert part_updates.are_worth_it(size, workers) is worth_it


class PartlyUsed(keras.layers.Dense):
    """Has a weight that the loss does not depend on."""

    def build(self, input_shape):
        super().build(input_shape)
        self.unused = self.add_weight(shape=(3,), name="unused")


@pytest.mark.parametrize(
    ("suits", "made"),
    [
        (True, step_of),
        (True, lambda: step_of(optimizer=keras.optimizers.SGD(0.1))),
        (False, lambda: step_of(optimizer=keras.optimizers.Adam(global_clipnorm=1.0))),
        (False, lambda: step_of(optimizer="nadam")),  # it has a product of numbers besides
        (False, lambda: step_of(PartlyUsed(4))),
        (False, lambda: step_of(keras.layers.Dense(4, dtype="float64"))),  # the last layer has another type
    ],
)
def test_which_trainings_suit(suits, made):
    assert part_updates.suits(made(), WHOLE.element_spec) is suits


def test_no_training_suits_where_processes_cannot_wait(monkeypatch):
    monkeypatch.setattr(words, "supported", lambda: False)
    assert not part_updates.suits(step_of(), WHOLE.element_spec)
