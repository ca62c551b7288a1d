"""The loss that Keras computes within a step and outside of one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from keras.src.losses import loss as keras_losses

from tests.support.compare import CLASSES, FEATURES
from tfdist_cli.train.model import losses
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep, values


@pytest.fixture
def three_replicas(monkeypatch):
    """A strategy with three replicas in sync, as far as Keras knows."""
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", 3)


def compiled(reduction):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    x, y = np.ones((4, FEATURES), np.float32), np.zeros((4, CLASSES), np.float32)
    model._symbolic_build(data_batch=(tf.constant(x), tf.constant(y)))
    losses.wrap_sum_losses(model)
    losses.wrap_sum_losses(model)
    return model, ops.ones((4, CLASSES)), y


def computed(model, prediction, y):
    return model.compute_loss(y=y, y_pred=prediction).numpy()


@pytest.mark.usefixtures("three_replicas")
def test_keras_still_divides_by_the_replicas():
    """If this fails, Keras no longer divides, and the patch in losses.py is not needed any more."""
    assert keras_losses.scale_loss_for_distribution(tf.constant(3.0)).numpy() == pytest.approx(1.0)


@pytest.mark.usefixtures("three_replicas")
@pytest.mark.parametrize("reduction", ["mean", "sum_over_batch_size", "mean_with_sample_weight"])
def test_a_mean_is_divided_by_the_replicas_outside_of_steps_only(reduction):
    model, *batch = compiled(reduction)
    with losses.batches_per_update(3):
        assert computed(model, *batch) == pytest.approx(1.0)
    assert computed(model, *batch) == pytest.approx(1 / 3)


def test_a_sum_counts_all_batches_of_a_step():
    model, *batch = compiled("sum")
    with losses.batches_per_update(3):
        assert computed(model, *batch) == pytest.approx(12.0)
    assert computed(model, *batch) == pytest.approx(4.0)


def test_values_for_each_example_are_summed_up_in_gradients():
    model, *batch = compiled("none")
    with losses.batches_per_update(3):
        values = model.compute_loss(y=batch[1], y_pred=batch[0])
        np.testing.assert_allclose(values, np.ones(4))
        np.testing.assert_allclose(losses.minimized(values), np.full(4, 3.0))
        assert losses.minimized(tf.constant(2.0)).numpy() == 2.0


class OwnTestStep(keras.Model):
    """Computes the loss of a batch itself, and keeps its mean."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean("mean")
        self.out = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, x):
        return self.out(x)

    def test_step(self, data):
        x, y = data
        self.mean.update_state(self.compute_loss(x, y, self(x, training=False)))
        return {"mean": self.mean.result()}


@pytest.mark.usefixtures("three_replicas")
def test_the_loss_of_an_own_test_step_is_not_divided_by_the_replicas():
    model = OwnTestStep()
    model.compile("sgd", "mse")
    batch = tf.ones((4, FEATURES)), tf.fill((4, 1), 2.0)
    step = ModelStep(model)
    step.build(tuple(tf.TensorSpec(part.shape, part.dtype) for part in batch))
    counted = MetricTotals(step, training=False).initial_values()

    @tf.function
    def scored():
        return step.evaluate(values(step.parameters), values(step.state), counted, batch).metrics

    of_variables = {variable.path: value for variable, value in zip(step.metrics, scored(), strict=True)}
    assert of_variables[model.mean.total.path].numpy() == pytest.approx(4.0)
