"""Models of Keras's examples of time series and sound: windows, graphs over time, spectra, speech."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import ONE_LAYER, adam, case, floats, integers, labels

NODES = 5


@case(lambda: 2 * (floats(16, 1),), scored=8, example="timeseries/timeseries_anomaly_detection")
def anomalies():
    model = keras.Sequential([
        keras.Input((16, 1)),
        layers.Conv1D(8, 7, padding="same", strides=2, activation="relu"), layers.Dropout(0.2),
        layers.Conv1D(4, 7, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(4, 7, padding="same", strides=2, activation="relu"), layers.Dropout(0.2),
        layers.Conv1DTranspose(8, 7, padding="same", strides=2, activation="relu"),
        layers.Conv1DTranspose(1, 7, padding="same"),
    ])  # fmt: skip
    model.compile(optimizer=adam(), loss="mse")
    return model


class GraphConvolution(layers.Layer):
    """Joins each node's features with the mean of its neighbors' features, by sums over the edges of a fixed graph."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        nodes = np.arange(NODES)
        self.sources, self.targets = np.tile(nodes, 2), np.concatenate([(nodes + 1) % NODES, (nodes + 2) % NODES])
        self.weight = keras.Variable(keras.initializers.GlorotUniform(3)((inputs, outputs)), name="weight")

    def call(self, features: Any) -> Any:
        neighbors = ops.take(features, self.targets, axis=0)
        mean = tf.math.unsorted_segment_mean(neighbors, self.sources, NODES)
        both = [ops.matmul(each, self.weight) for each in (features, mean)]
        return ops.relu(ops.concatenate(both, axis=-1))


class GraphOverTime(layers.Layer):
    """A graph convolution of each time step, and an LSTM of each node."""

    def __init__(self, inputs: int, steps: int) -> None:
        super().__init__()
        self.convolution = GraphConvolution(inputs, 4)
        self.lstm, self.dense = layers.LSTM(8, activation="relu"), layers.Dense(steps)

    def call(self, x: Any) -> Any:
        found = self.convolution(ops.transpose(x, [2, 0, 1, 3]))
        batch, steps, size = ops.shape(found)[1], found.shape[2], found.shape[3]
        found = self.dense(self.lstm(ops.reshape(found, (batch * NODES, steps, size))))
        return ops.transpose(ops.reshape(found, (NODES, batch, -1)), [1, 2, 0])


@case(
    lambda: (floats(6, NODES, 1), floats(3, NODES)),
    scored=8,
    refused=ONE_LAYER,
    example="timeseries/timeseries_traffic_forecasting",
)
def traffic():
    inputs = keras.Input((6, NODES, 1))
    model = keras.Model(inputs, GraphOverTime(1, 3)(inputs))
    model.compile(keras.optimizers.RMSprop(1e-3, epsilon=1e-4), losses.MeanSquaredError())
    return model


def _spectrum() -> Any:
    def prepared(sound: Any, speaker: Any) -> Any:
        found = tf.signal.fft(tf.cast(tf.squeeze(sound, axis=-1), tf.complex64))
        return tf.abs(found[:, : sound.shape[1] // 2, tf.newaxis]), speaker

    return prepared


@case(lambda: (floats(32, 1), labels()), prepare=_spectrum, example="audio/speaker_recognition_using_cnn")
def speakers():
    inputs = x = keras.Input((16, 1))
    for filters in (4, 8):
        short = layers.Conv1D(filters, 1, padding="same")(x)
        x = layers.Conv1D(filters, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.MaxPool1D(2, 2)(layers.Activation("relu")(layers.Add()([x, short])))
    x = layers.Dense(8, "relu")(layers.Flatten()(layers.AveragePooling1D(2, 2)(x)))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises to a rate and falls from it, by the step's epoch."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch

    def __call__(self, step: Any) -> Any:
        epoch = ops.cast(step // self.steps_per_epoch, "float32")
        return ops.minimum(1e-4 + 5e-4 * epoch, ops.maximum(1e-5, 1e-3 - 1e-4 * epoch))


class Speech(keras.Model):
    """A transformer from sound to text, whose train step shifts the text and leaves padding out by sample weights."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.heard = keras.Sequential([layers.Conv1D(8, 3, strides=2, padding="same", activation="relu")])
        self.tokens, self.places = layers.Embedding(12, 8), layers.Embedding(5, 8)
        self.own, self.cross = layers.MultiHeadAttention(2, 4), layers.MultiHeadAttention(2, 4)
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(3)]
        self.dense, self.classes = layers.Dense(8, "relu"), layers.Dense(12)

    def call(self, inputs: Any) -> Any:
        sound, text = inputs
        heard = self.heard(sound)
        x = self.tokens(text) + self.places(ops.arange(5))
        x = self.norms[0](x + self.own(x, x, use_causal_mask=True))
        x = self.norms[1](x + self.cross(x, heard))
        return self.classes(self.norms[2](x + self.dense(x)))

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_metric]

    def _loss(self, batch: Any) -> Any:
        sound, text = batch["source"], batch["target"]
        found = self([sound, text[:, :-1]])
        wanted = ops.one_hot(text[:, 1:], 12)
        return self.compute_loss(None, wanted, found, sample_weight=ops.cast(text[:, 1:] != 0, "float32"))

    def train_step(self, batch: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(batch)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.loss_metric.update_state(self._loss(batch))
        return {"loss": self.loss_metric.result()}


@case(lambda: {"source": floats(12, 4), "target": integers(12, 6)}, scored=8, example="audio/transformer_asr")
def speech():
    model = Speech()
    loss = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(keras.optimizers.SGD(WarmUp(6), momentum=0.9), loss)
    return model
