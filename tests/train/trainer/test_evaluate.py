"""Tests of `tfdist.evaluate`: it returns the same as `keras.Model.evaluate`."""

import json

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


@pytest.mark.slow
def test_infinite_data_needs_a_number_of_batches():
    model, data = classifier(), classes(16)
    metrics = tfdist.evaluate(model, batches(*data).repeat(), steps=2)
    assert metrics == pytest.approx(tfdist.evaluate(model, data), rel=1e-5)
    with raises(TrainingError, "endless-evaluation-data"):
        tfdist.evaluate(model, batches().repeat())


def test_the_model_is_unchanged():
    model = classifier()
    before = model.get_weights()
    tfdist.evaluate(model, classes())
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations) == 0


def test_an_evaluator_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {}, "task": {"type": "evaluator", "index": 0}}))
    monkeypatch.setattr(join, "_joined", ClusterContext(Environment.read(), tf.distribute.get_strategy()))
    with raises(UsageError, "not-on-evaluator"):
        tfdist.evaluate(classifier(), classes())
