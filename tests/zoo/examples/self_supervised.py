"""Models of Keras's examples of self-supervision: masked patches, contrasted views, queues of neighbors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import EXAMPLES, ONE_UPDATE, adam, case, labels, random

PATCHES, SHOWN, SIZE = 9, 4, 8


def _photos() -> np.ndarray:
    return random().integers(0, 256, (EXAMPLES, 12, 12, 3)).astype(np.float32)


class MaskedAutoencoder(keras.Model):
    """Hides patches of images by random numbers, and learns to draw them from the others."""

    def __init__(self) -> None:
        super().__init__()
        self.augmentation = keras.Sequential([layers.Rescaling(1 / 255), layers.RandomFlip("horizontal", seed=3)])
        self.seeds = keras.random.SeedGenerator(7)
        self.project, self.position = layers.Dense(SIZE), layers.Embedding(PATCHES, SIZE)
        self.attention, self.norm = layers.MultiHeadAttention(2, SIZE), layers.LayerNormalization(epsilon=1e-6)
        self.decoder = keras.Sequential([layers.Dense(SIZE, "gelu"), layers.Dense(48, "sigmoid")])
        self.token = self.add_weight(shape=(1, 48), initializer="random_normal", name="token")

    def calculate_loss(self, images: Any, training: bool) -> Any:
        patches = ops.reshape(ops.image.extract_patches(self.augmentation(images, training=training), 4), (-1, 9, 48))
        order = ops.argsort(keras.random.uniform(ops.shape(patches)[:2], seed=self.seeds), axis=-1)
        hidden, shown = order[:, :-SHOWN], order[:, -SHOWN:]
        places = self.position(ops.arange(PATCHES))
        seen = self.project(ops.take_along_axis(patches, shown[..., None], axis=1)) + ops.take(places, shown, axis=0)
        encoded = self.norm(seen + self.attention(seen, seen))
        blank = self.project(ops.expand_dims(self.token, 0)) + ops.take(places, hidden, axis=0)
        drawn = self.decoder(ops.concatenate([encoded, blank], axis=1))
        hidden_patches = ops.take_along_axis(patches, hidden[..., None], axis=1)
        loss = self.compute_loss(y=hidden_patches, y_pred=drawn[:, SHOWN:])
        return loss, hidden_patches, drawn[:, SHOWN:]

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, patches, drawn = self.calculate_loss(images, True)
        parts = [self.project, self.position, self.attention, self.norm, self.decoder]
        variables = [variable for part in parts for variable in part.trainable_variables]
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        self.optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
        return self._scores(loss, patches, drawn)

    def test_step(self, images: Any) -> dict[str, Any]:
        return self._scores(*self.calculate_loss(images, False))

    def _scores(self, loss: Any, patches: Any, drawn: Any) -> dict[str, Any]:
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (patches, drawn)))
        return {metric.name: metric.result() for metric in self.metrics}


@case(_photos, scored=8, example="vision/masked_image_modeling")
def masked_patches():
    model = MaskedAutoencoder()
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 12, warmup_target=1e-3, warmup_steps=4)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=1e-4, epsilon=1e-4)
    model.compile(optimizer, losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    return model


def _two_sources() -> Any:
    """Images without classes beside images with classes, as two zipped datasets."""
    return (_photos(), np.zeros(EXAMPLES, np.int64)), (_photos()[::-1].copy(), labels())


def _contrast(first: Any, second: Any, temperature: float) -> Any:
    first, second = (keras.utils.normalize(each, axis=1, order=2) for each in (first, second))
    similar = ops.matmul(first, ops.transpose(second)) / temperature
    own = ops.arange(ops.shape(first)[0])
    both = ops.concatenate([similar, ops.transpose(similar)], axis=0)
    return ops.concatenate([own, own], axis=0), both


class Contrastive(keras.Model):
    """Contrasts two augmented views of images, and trains a linear probe on their features, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.contrastive_augmenter, self.classification_augmenter = self.augmenter(0.3, 1), self.augmenter(0.1, 4)
        self.encoder = keras.Sequential([
            keras.Input((12, 12, 3)), layers.Conv2D(6, 3, strides=2, activation="relu"), layers.Flatten(),
            layers.Dense(SIZE, "relu"),
        ])  # fmt: skip
        self.projection_head = keras.Sequential([keras.Input((SIZE,)), layers.Dense(SIZE, "relu"), layers.Dense(SIZE)])
        self.linear_probe = keras.Sequential([keras.Input((SIZE,)), layers.Dense(3)])

    def augmenter(self, factor: float, seed: int) -> keras.Model:
        return keras.Sequential([
            keras.Input((12, 12, 3)), layers.Rescaling(1 / 255), layers.RandomFlip("horizontal", seed=seed),
            layers.RandomTranslation(factor, factor, seed=seed + 1), layers.RandomZoom((-factor, 0.0), seed=seed + 2),
        ])  # fmt: skip

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any) -> None:
        super().compile()
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self) -> list[Any]:
        return [
            self.contrastive_loss_tracker, self.contrastive_accuracy, self.probe_loss_tracker, self.probe_accuracy,
        ]  # fmt: skip

    def contrastive_loss(self, first: Any, second: Any) -> Any:
        own, similar = _contrast(first, second, 0.1)
        self.contrastive_accuracy.update_state(own, similar)
        return ops.mean(losses.sparse_categorical_crossentropy(own, similar, from_logits=True))

    def train_step(self, data: Any) -> dict[str, Any]:
        (unlabeled, _), (labeled, classes) = data
        images = ops.concatenate([unlabeled, labeled], axis=0)
        views = [self.contrastive_augmenter(images, training=True) for _ in range(2)]
        variables = self.encoder.trainable_weights + self.projection_head.trainable_weights
        with tf.GradientTape() as tape:
            projections = [self.projection_head(self.encoder(view, training=True), training=True) for view in views]
            loss = self.contrastive_loss(*projections)
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.contrastive_loss_tracker.update_state(loss)
        seen = self.classification_augmenter(labeled, training=True)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(seen, training=False), training=True)
            probe_loss = self.probe_loss(classes, logits)
        variables = self.linear_probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, variables), variables, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(classes, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        images, classes = data
        seen = self.classification_augmenter(images, training=False)
        logits = self.linear_probe(self.encoder(seen, training=False), training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(classes, logits))
        self.probe_accuracy.update_state(classes, logits)
        return {metric.name: metric.result() for metric in self.metrics[2:]}


@case(
    _two_sources,
    copies=True,
    validation=lambda: (_photos()[:8], labels()[:8]),
    tolerance=1e-4,
    why="images are contrasted within a batch; squares of gradients of 10",
    refused=ONE_UPDATE,
    example="vision/semisupervised_simclr",
)
def contrasted_views():
    model = Contrastive()
    model.compile(adam(), adam())
    return model


class NearestNeighbors(Contrastive):
    """Contrasts an image with the nearest of the last projections, which a queue in a variable keeps."""

    def __init__(self) -> None:
        super().__init__()
        start = random().normal(size=(12, SIZE)).astype(np.float32)
        start /= np.linalg.norm(start, axis=1, keepdims=True)
        self.queue = keras.Variable(start, trainable=False, name="queue")

    def augmenter(self, factor: float, seed: int) -> keras.Model:
        return keras.Sequential([keras.Input((12, 12, 3)), layers.Rescaling(1 / 255)])

    def _nearest(self, projections: Any) -> Any:
        found = ops.argmax(ops.matmul(projections, ops.transpose(self.queue)), axis=1)
        return projections + ops.stop_gradient(ops.take(self.queue, found, axis=0) - projections)

    def contrastive_loss(self, first: Any, second: Any) -> Any:
        first, second = (keras.utils.normalize(each, axis=1, order=2) for each in (first, second))
        self.contrastive_accuracy.update_state(*_contrast(first, second, 0.1))
        own, similar = _contrast(self._nearest(first), second, 0.1)
        self.queue.assign(ops.concatenate([first, self.queue[: -ops.shape(first)[0]]], axis=0))
        return losses.sparse_categorical_crossentropy(own, similar, from_logits=True)


@case(
    _two_sources,
    copies=True,
    validation=lambda: (_photos()[:8], labels()[:8]),
    tolerance=1e-3,
    why="images are contrasted within a batch; squares of gradients of 10",
    refused=ONE_UPDATE,
    example="vision/nnclr",
)
def nearest_neighbors():
    model = NearestNeighbors()
    model.compile(adam(), adam())
    return model
