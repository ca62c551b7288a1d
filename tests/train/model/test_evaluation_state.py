"""State that layers assign and random values that they draw during evaluation are kept, as in Keras."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfdist_cli as tfdist
from tests.support.compare import assert_same, batches, classes, classifier, train_both
from tfdist_cli.train.model import evaluation

pytestmark = pytest.mark.slow


class Counts(layers.Layer):
    """Counts batches, keeps a moving mean, and draws random values."""

    def build(self, shape):
        self.batches = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="batches")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x):
        self.batches.assign_add(1)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x + self.mean + keras.random.normal(ops.shape(x), stddev=0.3, seed=self.seeds)


def on_each_batch():
    """A callback for validation batches, with which these are evaluated one by one."""
    return keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: None)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("callbacks", [[], [on_each_batch]])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_state_and_random_numbers_continue_after_validation(optimizer, callbacks):
    scored = batches(*classes(21, seed=1))
    plain, ours = train_both(
        lambda: classifier(Counts(), layers.Dropout(0.3), layers.Dense(4), optimizer=optimizer),
        epochs=3,
        validation=scored,
        callbacks=[make() for make in callbacks],
    )
    assert_same(plain, ours)
    assert int(ours.layers[0].batches.numpy()) == 3 * (6 + 3)


def test_recurrent_layers_draw_their_masks_in_validation():
    def build():
        return classifier(layers.Reshape((5, 1)), layers.GRU(4, dropout=0.3, recurrent_dropout=0.2))

    assert_same(*train_both(build, validation=batches(*classes(21, seed=1))))


def test_the_number_of_executions_changes_no_result(monkeypatch):
    def scored(seconds):
        monkeypatch.setattr(evaluation, "EXECUTION_SECONDS", seconds)
        keras.utils.set_random_seed(1)
        model = classifier(Counts(), layers.Dropout(0.3), layers.Dense(4))
        metrics = tfdist.evaluate(model, batches(*classes(45, seed=1)))
        return metrics, [np.asarray(variable) for variable in model.variables]

    (metrics, variables), (ours, own) = scored(1000.0), scored(0.0)
    assert ours == metrics
    assert all((one == other).all() for one, other in zip(variables, own, strict=True))
