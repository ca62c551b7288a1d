"""Models of Keras's guides and recipes: custom steps, several inputs and outputs, callbacks, transfer, masks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import EXAMPLES, adam, case, floats, integers, labels, random, sgd, tokens


class CustomStep(keras.Model):
    """A train step and a test step that compute the loss with sample weights."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = data if len(data) == 3 else (*data, None)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._scores(loss, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = data if len(data) == 3 else (*data, None)
        y_pred = self(x, training=False)
        return self._scores(self.compute_loss(y=y, y_pred=y_pred), y, y_pred, sample_weight)

    def _scores(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


@case(
    lambda: (floats(8), labels()),
    scored=8,
    fit=lambda: {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    example="guides/custom_train_step_in_tensorflow",
)
def steps_with_class_weights():
    inputs = keras.Input((8,))
    model = CustomStep(inputs, layers.Dense(3, "softmax")(layers.Dense(8, "relu")(inputs)))
    model.compile(adam(), "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    return model


def _tickets() -> Any:
    source = random()
    x = {"title": integers(20, 6), "body": integers(20, 9), "tags": source.integers(0, 2, (EXAMPLES, 4))}
    y = {"priority": source.uniform(size=(EXAMPLES, 1)), "department": np.eye(3)[labels()]}
    return {name: each.astype(np.float32) for name, each in x.items()}, y


@case(_tickets, scored=8, example="guides/functional_api")
def tickets():
    title, body = keras.Input((None,), name="title"), keras.Input((None,), name="body")
    tags = keras.Input((4,), name="tags")
    read = layers.LSTM(6)(layers.Embedding(20, 6)(title)), layers.LSTM(4)(layers.Embedding(20, 6)(body))
    x = layers.concatenate([*read, tags])
    outputs = {"priority": layers.Dense(1, name="priority")(x), "department": layers.Dense(3, name="department")(x)}
    model = keras.Model({"title": title, "body": body, "tags": tags}, outputs)
    model.compile(
        sgd(),
        loss={
            "priority": losses.BinaryCrossentropy(from_logits=True),
            "department": losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"department": ["accuracy"]},
    )
    return model


class Patient(keras.callbacks.Callback):
    """Stops when the loss has not fallen for some epochs, and restores the best weights."""

    def __init__(self, patience: int) -> None:
        super().__init__()
        self.patience, self.waited, self.best, self.best_weights = patience, 0, np.inf, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs["loss"] < self.best:
            self.best, self.waited, self.best_weights = logs["loss"], 0, self.model.get_weights()
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.model.stop_training = True
            self.model.set_weights(self.best_weights)


class Rates(keras.callbacks.Callback):
    """Sets the learning rate at the start of each epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rate = float(ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = rate * (0.5 if epoch else 1.0)


@case(
    lambda: (floats(8), floats(1)),
    scored=8,
    fit=lambda: {"callbacks": [Rates(), Patient(1)]},
    example="guides/writing_your_own_callbacks",
)
def callbacks():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile(adam(), "mean_squared_error", metrics=["mean_absolute_error"])
    return model


@case(
    lambda: (floats(8, 8, 3), random().integers(0, 2, EXAMPLES)),
    copies=True,
    why="each worker normalizes by its own batch in the layers that are fine-tuned",
    example="guides/transfer_learning",
)
def transferred():
    base = keras.Sequential([
        keras.Input((8, 8, 3)), layers.SeparableConv2D(4, 3, padding="same"), layers.BatchNormalization(),
        layers.ReLU(), layers.Conv2D(8, 3, strides=2, use_bias=False), layers.BatchNormalization(), layers.ReLU(),
    ])  # fmt: skip
    base.trainable = False
    inputs = keras.Input((8, 8, 3))
    x = base(layers.Rescaling(1 / 127.5, offset=-1)(inputs), training=False)
    outputs = layers.Dense(1)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    base.trainable = True
    for layer in base.layers[:3]:
        layer.trainable = False
    model.compile(adam(), losses.BinaryCrossentropy(from_logits=True), metrics=[keras.metrics.BinaryAccuracy()])
    return model


class TemporalSplit(layers.Layer):
    """Splits sequences in two, with their masks."""

    def call(self, x: Any) -> Any:
        return ops.split(x, 2, axis=1)

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return None if mask is None else ops.split(mask, 2, axis=1)


class MaskedEmbedding(layers.Layer):
    """Makes a mask of tokens."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.words, self.size = words, size

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(self.words, self.size), initializer="random_normal", name="table")

    def call(self, ids: Any) -> Any:
        return ops.take(self.table, ids, axis=0)

    def compute_mask(self, ids: Any, mask: Any = None) -> Any:
        return ops.not_equal(ids, 0)


class TemporalSoftmax(layers.Layer):
    """Weighs time steps, and needs their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, x: Any, mask: Any = None) -> Any:
        seen = ops.expand_dims(ops.cast(mask, "float32"), -1)
        raised = ops.exp(x) * seen
        return raised / (ops.sum(raised, axis=1, keepdims=True) + 1e-6)


@case(
    lambda: (tokens()[0], floats(3, 1)),
    copies=True,
    why="each worker divides by the unmasked steps of its own batch",
    example="guides/understanding_masking_and_padding",
)
def masks():
    inputs = keras.Input((6,), dtype="int32")
    first, second = TemporalSplit()(MaskedEmbedding(20, 4)(inputs))
    x = layers.GRU(4, return_sequences=True)(layers.Dense(4, "tanh")(first))
    x = layers.Add()([x, layers.LSTM(4, return_sequences=True)(second)])
    model = keras.Model(inputs, TemporalSoftmax()(layers.Dense(1)(x)))
    model.compile(sgd(), "mse")
    return model
