"""Tests of `tfdist.evaluate`: it returns the same as `keras.Model.evaluate`."""

import json

import keras
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.train.cluster import join
from tfdist_cli.train.cluster.join import ClusterContext


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"batch_size": 7}])
def test_metrics_equal_keras(given):
    model, data = classifier(), classes(45)
    metrics = tfdist.evaluate(model, data, **given)
    expected = model.evaluate(*data, verbose=0, return_dict=True)
    assert list(metrics) == ["loss", "accuracy"]
    assert metrics == pytest.approx(expected, rel=1e-5)


class Outputs(keras.metrics.Metric):
    """Has two values."""

    def __init__(self):
        super().__init__(name="outputs")
        self.sum = self.add_weight(name="sum", initializer="zeros")
        self.squares = self.add_weight(name="squares", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sum.assign_add(keras.ops.sum(y_pred))
        self.squares.assign_add(keras.ops.sum(keras.ops.square(y_pred)))

    def result(self):
        return {"squares": self.squares, "a_sum": self.sum}


@pytest.mark.slow
def test_a_list_of_values_has_the_order_of_keras():
    model, data = classifier(), classes(24)
    model.compile("sgd", model.loss, metrics=[Outputs(), "accuracy"])
    expected = model.evaluate(*data, verbose=0)
    assert len(expected) == 4
    assert tfdist.evaluate(model, data, return_dict=False) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_infinite_data_needs_a_number_of_batches():
    model, data = classifier(), classes(16)
    metrics = tfdist.evaluate(model, batches(*data).repeat(), steps=2)
    assert metrics == pytest.approx(tfdist.evaluate(model, data), rel=1e-5)
    with raises(TrainingError, "endless-evaluation-data"):
        tfdist.evaluate(model, batches().repeat())


@pytest.mark.slow
def test_steps_divide_arrays_as_in_keras():
    model, data = classifier(metrics=["accuracy"]), classes(45)
    expected = model.evaluate(*data, steps=4, verbose=0, return_dict=True)
    assert tfdist.evaluate(model, data, steps=4) == pytest.approx(expected, rel=1e-5)


def test_the_model_is_unchanged():
    model = classifier()
    before = model.get_weights()
    tfdist.evaluate(model, classes())
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations) == 0


class Batches(keras.callbacks.Callback):
    """Records the hooks of an evaluation, and ends it after some batches."""

    def __init__(self, ends_at=None):
        super().__init__()
        self.calls, self.ends_at = [], ends_at

    def on_test_begin(self, logs=None):
        self.calls.append("begin")
        self.model.layers[-1].bias.assign_add([1.0, 0.0, 0.0])

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append((batch, {name: round(value, 5) for name, value in logs.items()}))
        self.model.stop_evaluating = batch == self.ends_at

    def on_test_end(self, logs=None):
        self.calls.append({name: round(value, 5) for name, value in logs.items()})


@pytest.mark.parametrize("given", [{}, {"ends_at": 1}])
def test_callbacks_are_called_as_in_keras(given):
    model, (x, y) = classifier(), classes(45)
    ours, expected = Batches(**given), Batches(**given)
    before = model.get_weights()
    metrics = tfdist.evaluate(model, x, y, batch_size=8, callbacks=ours)
    model.set_weights(before)
    model.evaluate(x, y, batch_size=8, callbacks=[expected], verbose=0)
    assert ours.calls == expected.calls
    assert metrics == pytest.approx(ours.calls[-1], abs=1e-5)


def test_an_evaluator_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {}, "task": {"type": "evaluator", "index": 0}}))
    monkeypatch.setattr(join, "_joined", ClusterContext(Environment.read(), tf.distribute.get_strategy()))
    with raises(UsageError, "not-on-evaluator"):
        tfdist.evaluate(classifier(), classes())
