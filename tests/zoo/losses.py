"""Models with each of Keras's losses and metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics

from tests.zoo.case import BATCH, CLASSES, EXAMPLES, ONE_LAYER, case, floats, integers, labels, random, sgd

PER_REPLICA = "computed from the whole batch, not from each example"


def _outputs(kinds: dict[str, tuple[Any, int, str | None]], shape: tuple[int, ...] = (8,)) -> keras.Model:
    """A model with one output per loss, each with its size and activation."""
    inputs = keras.Input(shape)
    hidden = layers.Dense(6, "tanh")(layers.Flatten()(inputs) if len(shape) > 1 else inputs)
    outputs = {name: layers.Dense(size, act, name=name)(hidden) for name, (_, size, act) in kinds.items()}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), {name: loss for name, (loss, _, _) in kinds.items()})
    return model


def _targets(kinds: Any, target: Any) -> Any:
    return lambda: (floats(8), {name: target(size) for name, (_, size, _) in kinds.items()})


class Quartic(losses.Loss):
    """A user-defined loss."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)


REGRESSION: dict[str, tuple[Any, int, str | None]] = {
    "mse": (losses.MeanSquaredError(), 2, None),
    "mae": (losses.MeanAbsoluteError(), 2, None),
    "mape": (losses.MeanAbsolutePercentageError(), 2, None),
    "msle": (losses.MeanSquaredLogarithmicError(), 2, "softplus"),
    "huber": (losses.Huber(), 2, None),
    "log_cosh": (losses.LogCosh(), 2, None),
    "cosine": (losses.CosineSimilarity(), 2, None),
    "poisson": (losses.Poisson(), 2, "softplus"),
    "summed": (losses.MeanSquaredError(reduction="sum"), 2, None),
    "own": (Quartic(), 2, None),
}
BINARY: dict[str, tuple[Any, int, str | None]] = {
    "binary": (losses.BinaryCrossentropy(from_logits=True), 1, None),
    "focal": (losses.BinaryFocalCrossentropy(), 1, "sigmoid"),
    "hinge": (losses.Hinge(), 1, "tanh"),
    "squared_hinge": (losses.SquaredHinge(), 1, "tanh"),
}
CATEGORICAL: dict[str, tuple[Any, int, str | None]] = {
    "categorical": (losses.CategoricalCrossentropy(label_smoothing=0.1), CLASSES, "softmax"),
    "focal": (losses.CategoricalFocalCrossentropy(), CLASSES, "softmax"),
    "hinge": (losses.CategoricalHinge(), CLASSES, None),
    "kl": (losses.KLDivergence(), CLASSES, "softmax"),
}
SPARSE: dict[str, tuple[Any, int, str | None]] = {
    "sparse": (losses.SparseCategoricalCrossentropy(ignore_class=None), CLASSES, "softmax"),
    "generalized": (losses.CategoricalGeneralizedCrossEntropy(), CLASSES, "softmax"),
}


def _numbers(size: int) -> np.ndarray:
    return np.abs(floats(size)) + 0.5


def _bits(size: int) -> np.ndarray:
    return integers(2, size)


def _one_hot(_size: int) -> np.ndarray:
    return np.eye(CLASSES, dtype=np.float32)[labels()]


@case(_targets(REGRESSION, _numbers), scored=2 * BATCH)
def losses_of_numbers():
    return _outputs(REGRESSION)


@case(_targets(BINARY, _bits), scored=2 * BATCH)
def losses_of_bits():
    return _outputs(BINARY)


@case(_targets(CATEGORICAL, _one_hot), scored=2 * BATCH)
def losses_of_classes():
    return _outputs(CATEGORICAL)


@case(_targets(SPARSE, lambda _: labels()), scored=2 * BATCH)
def losses_of_class_numbers():
    return _outputs(SPARSE)


OVERLAP: dict[str, tuple[Any, int, str | None]] = {
    "dice": (losses.Dice(), 4, "sigmoid"),
    "tversky": (losses.Tversky(), 4, "sigmoid"),
}
PAIRS: dict[str, tuple[Any, int, str | None]] = {"circle": (losses.Circle(), 4, None)}


@case(_targets(OVERLAP, lambda size: integers(2, size).astype(np.float32)), copies=True, why=PER_REPLICA)
def losses_of_overlaps():
    return _outputs(OVERLAP)


@case(_targets(PAIRS, lambda _: labels()), copies=True, refused=ONE_LAYER, why=PER_REPLICA)
def circle_loss():
    inputs = keras.Input((8,))
    unit = layers.UnitNormalization(name="circle")(layers.Dense(4)(inputs))
    model = keras.Model(inputs, {"circle": unit})
    model.compile(sgd(), {"circle": losses.Circle()})
    return model


def weighted() -> Any:
    return floats(8), floats(2), np.abs(floats()) + 0.1


@case(weighted)
def sample_weights():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4, "tanh")(inputs)))
    model.compile(sgd(), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


@case(weighted, copies=True, why="each worker divides by the weights of its own batch")
def mean_of_sample_weights():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4, "tanh")(inputs)))
    model.compile(sgd(), losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return model


def nested_weights() -> Any:
    y = {"some": floats(2), "others": (floats(1),)}
    w = {"some": np.abs(floats()) + 0.1, "others": (np.abs(floats()) + 0.2,)}
    return floats(8), y, w


@case(nested_weights, scored=2 * BATCH)
def nested_outputs_and_sample_weights():
    inputs = keras.Input((8,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(inputs, {"some": layers.Dense(2)(hidden), "others": (layers.Dense(1)(hidden),)})
    model.compile(sgd(), {"some": "mse", "others": ("mae",)}, metrics={"some": ["mae"]})
    return model


def transcripts() -> Any:
    return floats(6, 4), random().integers(1, 4, (EXAMPLES, 2)).astype(np.int32)


@case(transcripts)
def ctc():
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, layers.Dense(5)(layers.Bidirectional(layers.LSTM(3, return_sequences=True))(inputs)))
    model.compile(sgd(), losses.CTC())
    return model


class Largest(metrics.Metric):
    """A user-defined metric that is not a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.largest + 0.0


class Count(metrics.Metric):
    """A user-defined metric that counts examples."""

    def __init__(self) -> None:
        super().__init__(name="count")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.total + 0.0  # if it returned the variable, Keras's history would contain the last value only


def _scored(size: int, activation: str | None, loss: Any, *scores: Any) -> keras.Model:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(size, activation)(layers.Dense(4, "tanh")(inputs)))
    model.compile(sgd(), loss, metrics=list(scores))
    return model


@case(lambda: (floats(8), _numbers(2)))
def metrics_of_numbers():
    return _scored(
        2, "softplus", "mse",
        metrics.MeanAbsoluteError(), metrics.MeanAbsolutePercentageError(), metrics.MeanSquaredError(),
        metrics.MeanSquaredLogarithmicError(), metrics.RootMeanSquaredError(), metrics.LogCoshError(),
        metrics.CosineSimilarity(), metrics.Poisson(), metrics.R2Score(), metrics.Accuracy(),
        metrics.MeanMetricWrapper(lambda true, pred: keras.ops.mean(keras.ops.abs(true - pred), axis=-1), name="own"),
        Count(),
    )  # fmt: skip


@case(lambda: (floats(8), _numbers(3)))
def correlations():
    return _scored(3, None, "mse", metrics.PearsonCorrelation(), metrics.ConcordanceCorrelation())


@case(lambda: (floats(8), _bits(1)))
def metrics_of_bits():
    return _scored(
        1, "sigmoid", "binary_crossentropy",
        metrics.AUC(), metrics.BinaryAccuracy(), metrics.BinaryCrossentropy(), metrics.BinaryIoU(),
        metrics.FalseNegatives(), metrics.FalsePositives(), metrics.TrueNegatives(), metrics.TruePositives(),
        metrics.Hinge(), metrics.SquaredHinge(), metrics.Precision(), metrics.Recall(),
        metrics.PrecisionAtRecall(0.5), metrics.RecallAtPrecision(0.5), metrics.SensitivityAtSpecificity(0.5),
        metrics.SpecificityAtSensitivity(0.5),
    )  # fmt: skip


@case(lambda: (floats(8), _one_hot(3)))
def metrics_of_classes():
    return _scored(
        CLASSES, "softmax", "categorical_crossentropy",
        metrics.CategoricalAccuracy(), metrics.CategoricalCrossentropy(), metrics.CategoricalHinge(),
        metrics.F1Score(), metrics.FBetaScore(), metrics.KLDivergence(), metrics.OneHotIoU(CLASSES, [0, 1]),
        metrics.OneHotMeanIoU(CLASSES), metrics.TopKCategoricalAccuracy(2),
    )  # fmt: skip


@case(lambda: (floats(8), labels()))
def metrics_of_class_numbers():
    return _scored(
        CLASSES, "softmax", "sparse_categorical_crossentropy",
        metrics.SparseCategoricalAccuracy(), metrics.SparseCategoricalCrossentropy(),
        metrics.SparseTopKCategoricalAccuracy(2), metrics.IoU(CLASSES, [0], sparse_y_pred=False),
        metrics.MeanIoU(CLASSES, sparse_y_pred=False),
    )  # fmt: skip


@case(lambda: (floats(8), _numbers(2)), refused={"": "metric-not-a-sum"}, why="a maximum is not a sum")
def metric_that_is_no_sum():
    return _scored(2, None, "mse", Largest())


class Watched(layers.Layer):
    """A layer with metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum = metrics.Mean("mean"), metrics.Sum("sum")

    def call(self, x: Any) -> Any:
        self.mean.update_state(keras.ops.mean(x))
        self.sum.update_state(keras.ops.sum(keras.ops.abs(x)))
        return x


@case(lambda: (floats(8), _numbers(2)), scored=2 * BATCH)
def metrics_of_layers():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(Watched()(layers.Dense(4)(inputs))))
    model.compile(sgd(), "mse")
    return model
