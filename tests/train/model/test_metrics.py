"""Metrics equal those of Keras, and their counts are exact."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import CLASSES, assert_same, batches, classes, classifier, train_both
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep

metrics = keras.metrics


class Peak(metrics.Metric):
    """The largest output, which cannot be computed from sums."""

    def __init__(self, **how):
        super().__init__(name="peak")
        self.peak = self.add_variable((), "zeros", name="peak", **how)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.peak.assign(keras.ops.maximum(self.peak, keras.ops.max(y_pred)))

    def result(self):
        return self.peak


class FromOne(metrics.Metric):
    """Counts from 1 instead of 0, and has several results."""

    def __init__(self):
        super().__init__(name="zz")  # sorted last, as its results are
        self.rows = self.add_weight(shape=(2,), initializer="ones", name="rows", dtype="int32")

    def reset_state(self):
        self.rows.assign([1, 1])

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(keras.ops.stack([keras.ops.shape(y_true)[0], 1]))

    def result(self):
        return {"zz_batches": self.rows[1], "zz_examples": self.rows[0]}


def one_hot_classifier():
    model = classifier()
    model.compile(
        "adam",
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[
            "accuracy",
            metrics.AUC(from_logits=True, name="auc"),
            metrics.Precision(thresholds=[0.2, 0.8], name="precision"),
            metrics.RecallAtPrecision(0.3, name="recall"),
            metrics.OneHotMeanIoU(CLASSES, name="iou"),
            metrics.F1Score(average="macro", name="f1"),
            metrics.R2Score(name="r2"),
            metrics.RootMeanSquaredError(name="rmse"),
            FromOne(),
        ],
        weighted_metrics=[metrics.CategoricalAccuracy(name="weighted")],
    )
    return model


@pytest.mark.slow
def test_every_kind_of_metric():
    x, y = classes()
    weights = np.linspace(0.5, 1.5, len(x), dtype=np.float32)
    data = batches(x, np.eye(CLASSES, dtype=np.float32)[y], weights)
    plain, ours = train_both(one_hot_classifier, data, validation=data)
    assert_same(plain, ours)
    assert ours.history.history["zz_examples"] == [45, 45]
    assert ours.history.history["val_zz_batches"] == [7, 7]


def test_a_metric_that_cannot_be_summed_is_refused():
    with raises(TrainingError, "metric-not-a-sum") as caught:
        tfdist.fit(classifier(metrics=[Peak(aggregation="mean")]), batches())
    assert "'peak/peak'" in caught.value.message
    assert "'mean'" in caught.value.message


def test_a_metric_that_is_not_a_sum_is_refused():
    with raises(TrainingError, "metric-not-a-sum") as caught:
        tfdist.fit(classifier(metrics=[Peak()]), batches())
    assert "'peak/peak'" in caught.value.message


def test_a_metric_is_called_once_in_each_trace():
    calls = []

    class Counted(FromOne):
        def update_state(self, *given, **weights):
            calls.append(self)
            super().update_state(*given, **weights)

    tfdist.fit(classifier(metrics=[Counted()]), batches(), steps_per_epoch=4, steps_per_execution=2)
    # Two steps of one execution, the call with which Keras builds the metric, and the trace for analysis.
    assert len(calls) == 2 + 1 + 1


class Cost(metrics.Metric):
    """What all examples cost; the cost of one is a constant in a variable."""

    def __init__(self):
        super().__init__(name="cost")
        self.cost = self.add_variable((), keras.initializers.Constant(5.0), name="one", aggregation="sum")
        self.total = self.add_variable((), "zeros", name="total", aggregation="sum")

    def reset_state(self):
        self.total.assign(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.total * self.cost


@pytest.mark.slow
def test_what_a_metric_does_not_reset_keeps_its_value():
    plain, ours = train_both(lambda: classifier(metrics=[Cost()]), batches(), validation=batches())
    assert_same(plain, ours)
    assert ours.history.history["cost"] == [220.0, 220.0]


def own_results(results):
    """A classifier that overrides `get_metrics_result` or `compute_metrics`."""

    class Own(keras.Sequential):
        pass

    def method(self, *given, **weights):
        found = getattr(super(Own, self), results)(*given, **weights)
        return {**found, "twice": 2 * found["accuracy"]}

    setattr(Own, results, method)
    model = Own(classifier().layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@pytest.mark.slow
def test_results_computed_from_metric_variables():
    plain, ours = train_both(lambda: own_results("get_metrics_result"), validation=batches())
    assert_same(plain, ours)
    assert "val_twice" in ours.history.history


def test_results_of_one_batch_are_refused():
    with raises(TrainingError, "metrics-results-differ") as caught:
        tfdist.fit(own_results("compute_metrics"), batches())
    assert "differ in twice" in caught.value.message


class Scored(keras.Sequential):
    """The example of `compute_metrics` in Keras's documentation."""

    def __init__(self, *given):
        super().__init__(*given)
        self.custom = metrics.MeanAbsoluteError(name="custom")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.custom.update_state(keras.ops.one_hot(y, CLASSES), y_pred)
        results["custom"] = self.custom.result()
        return results


@pytest.mark.slow
def test_metrics_that_a_model_computes():
    def build():
        model = Scored(classifier().layers)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    assert_same(*train_both(build, validation=batches()))


def test_counts_beyond_float32_are_exact():
    model = classifier(metrics=[FromOne()])
    step = ModelStep(model)
    step.build(batches().element_spec)
    totals = MetricTotals(step)
    counted = np.zeros(totals.size)
    counted[-2] = 2**24 + 1
    for _ in range(3):
        totals.add(counted)
    assert totals.logs()["zz_examples"] == 3 * (2**24 + 1) + 1


def test_the_variables_on_ps_are_assigned_the_same_values_in_one_function(monkeypatch):
    model = classifier(metrics=[FromOne(), "accuracy"])
    step = ModelStep(model)
    step.build(batches().element_spec)
    totals = MetricTotals(step)
    totals.add(np.arange(totals.size, dtype=np.float64) + 0.5)
    totals.write()
    expected = [each.numpy() for each in step.metrics]
    for variable in step.metrics:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", type(tf.distribute.get_strategy()))
    monkeypatch.delattr("tfdist_cli.train.model.metrics._assign")  # one by one
    totals.write()
    for variable, value in zip(step.metrics, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.slow
def test_a_model_without_metrics_reports_its_loss():
    history = tfdist.fit(classifier(metrics=[]), batches(), validation_data=batches())
    assert list(history.history) == ["loss", "val_loss"]


def test_an_execution_that_only_reports_dropped_gradients_counts_nothing():
    step = ModelStep(classifier(metrics=["accuracy"]))
    step.build(batches().element_spec)
    totals = MetricTotals(step)
    totals.add(np.ones(totals.size))
    before = totals.packed()
    totals.add(0.0)
    assert totals.packed() == before != [0.0] * totals.size
    assert totals.following(0.0, 0.0) == 0.0
