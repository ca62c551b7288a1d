"""Models with a `train_step` of their own, as in Keras's examples: GANs, distillation, self-supervision.

own_steps.py UPDATES CASE...

Trains models on its cluster, or with `keras.Model.fit` if there is none, and prints the results. Without a cluster
each batch is two workers' batches together. UPDATES is the update mode on parameter servers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist_cli as tfdist
from tfdist_cli.errors import TrainingError

SIZE, LATENT, CLASSES = 6, 3, 4
BATCH = 8


def points(examples: int = 96, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns points around one center per class, and the classes."""
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, examples)
    centers = np.random.default_rng(99).normal(size=(CLASSES, SIZE))
    return (centers[y] + 0.3 * random.normal(size=(examples, SIZE))).astype(np.float32), y


def _dense(inputs: int, *units: int, activation: str = "tanh") -> keras.Model:
    *hidden, last = units
    rest = [layers.Dense(each, activation) for each in hidden]
    return keras.Sequential([keras.Input((inputs,)), *rest, layers.Dense(last)])


class GAN(keras.Model):
    """Two networks, two optimizers, and a metric for each loss. The noise comes with the data, or is drawn."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model, *, draws: bool) -> None:
        super().__init__()
        self.discriminator, self.generator, self.draws = discriminator, generator, draws
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data: Any) -> dict[str, Any]:
        real, given = data if isinstance(data, tuple) else (data, None)
        batch_size = ops.shape(real)[0]
        if self.draws:
            given = keras.random.normal((batch_size, LATENT), seed=self.seed_generator)
        generated = self.generator(given)
        combined = ops.concatenate([generated, real], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))

        misleading = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(given))
            g_loss = self.loss_fn(misleading, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def gan(*, draws: bool = False, optimizer: Any = keras.optimizers.Adam) -> keras.Model:
    """Returns a compiled GAN of small networks."""
    model = GAN(_dense(SIZE, 8, 1), _dense(LATENT, 8, SIZE), draws=draws)
    model.compile(optimizer(0.01), optimizer(0.02), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class CriticGAN(keras.Model):
    """A Wasserstein GAN with gradient penalty: several updates of the critic, and logs that are no metrics."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_steps, self.gp_weight = 2, 10.0

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def gradient_penalty(self, real: Any, fake: Any) -> Any:
        interpolated = 0.3 * real + 0.7 * fake
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1]) + 1e-8)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data
        before = ops.cast(self.d_optimizer.iterations, "float32")
        for _ in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = tf.reduce_mean(self.discriminator(fake, training=True))
                cost -= tf.reduce_mean(self.discriminator(real, training=True))
                d_loss = cost + self.gradient_penalty(real, fake) * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(noise, training=True), training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables, strict=True))
        counts = [ops.cast(each.iterations, "float32") for each in (self.d_optimizer, self.g_optimizer)]
        return {"d_loss": d_loss, "g_loss": g_loss, "before": before, "d_updates": counts[0], "g_updates": counts[1]}


def critic_gan() -> keras.Model:
    """Returns a compiled Wasserstein GAN of small networks."""
    model = CriticGAN(_dense(SIZE, 8, 1), _dense(LATENT, 8, SIZE))
    model.compile(*(keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.9) for _ in range(2)))
    return model


class SpectralGAN(GAN):
    """A GAN whose discriminator's weights are normalized in each call, which assigns them: three times in a step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data
        fakes, reals = ops.ones((ops.shape(real)[0], 1)), ops.zeros((ops.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(reals, self.discriminator(real, training=True))
            d_loss += self.loss_fn(fakes, self.discriminator(self.generator(noise), training=True))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply(gradients, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(reals, self.discriminator(self.generator(noise), training=True))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(gradients, self.generator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def spectral_gan() -> keras.Model:
    """Returns a compiled GAN with spectral normalization."""
    normalized = [layers.SpectralNormalization(layers.Dense(units, "tanh")) for units in (8, 1)]
    model = SpectralGAN(keras.Sequential([keras.Input((SIZE,)), *normalized]), _dense(LATENT, 8, SIZE), draws=False)
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
    model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class Distiller(keras.Model):
    """A student learns from the data and from a teacher, which is not trained."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(
        self,
        optimizer: Any,
        metrics: Any,
        student_loss_fn: Any,
        distillation_loss_fn: Any,
        alpha: float,
        temperature: float,
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature
        self.total = keras.metrics.Mean(name="loss")
        self.student_loss_tracker = keras.metrics.Mean(name="student_loss")

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, student_predictions)
            distillation_loss = (
                self.distillation_loss_fn(
                    tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                    tf.nn.softmax(student_predictions / self.temperature, axis=1),
                )
                * self.temperature**2
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        trainable_vars = self.student.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
        logs = self.compute_metrics(x, y, student_predictions)
        self.student_loss_tracker.update_state(student_loss)
        return {"accuracy": logs["accuracy"], "student_loss": self.student_loss_tracker.result(), "raw": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_prediction = self.student(x, training=False)
        self.student_loss_tracker.update_state(self.student_loss_fn(y, y_prediction))
        return {"student_loss": self.student_loss_tracker.result()}


def distiller() -> keras.Model:
    """Returns a compiled distiller of small networks."""
    model = Distiller(student=_dense(SIZE, 4, CLASSES), teacher=_dense(SIZE, 16, CLASSES))
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=3,
    )
    return model


class Averaged(keras.Model):
    """Self-supervision: an average of the network's weights, moved after each update, gives the targets."""

    def __init__(self, network: keras.Model, target: keras.Model) -> None:
        super().__init__()
        self.network, self.target = network, target
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.network(x, training=True) - self.target(x[:, ::-1], training=True)))
            loss += ops.mean(ops.square(self.network(x) - x))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        for weight, average in zip(self.network.weights, self.target.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


def averaged() -> keras.Model:
    """Returns a compiled model whose targets follow its network."""
    network = _dense(SIZE, 8, SIZE)
    target = keras.models.clone_model(network)
    target.set_weights(network.get_weights())
    model = Averaged(network, target)
    model.compile(optimizer=keras.optimizers.SGD(0.05))
    return model


class Own(keras.Model):
    """The train step of Keras's guide, with the compiled loss and metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class Annealed(Own):
    """A step whose loss, and reports, depend on the number of updates so far, as the annealing of a VAE does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        before = ops.cast(self.optimizer.iterations, "float32")
        with tf.GradientTape() as tape:
            loss = (1 + before) / 10 * self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "before": before, "rate": self.optimizer.learning_rate}


def annealed() -> keras.Model:
    """Returns a compiled classifier with a learning rate that follows from the number of updates."""
    inputs = keras.Input((SIZE,))
    model = Annealed(inputs, layers.Dense(CLASSES)(layers.Dense(6, "tanh")(inputs)))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.7)
    model.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def own(*normalizing: Any) -> keras.Model:
    """Returns a compiled classifier, whose step is that of the guide."""
    inputs = keras.Input((SIZE,))
    x = layers.Dense(6, "relu")(inputs)
    for layer in normalizing:
        x = layer(x)
    model = Own(inputs, layers.Dense(CLASSES)(x))
    model.compile(
        keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def stateful() -> keras.Model:
    """Returns a compiled model whose recurrent layer continues from batch to batch; each worker has its own state."""
    inputs = keras.Input(batch_shape=(BATCH if "TF_CONFIG" in os.environ else 2 * BATCH, SIZE, 1))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GRU(4, stateful=True)(inputs)))
    model.compile(keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


NOISE = np.random.default_rng(5).normal(size=(96, LATENT)).astype(np.float32)
X, Y = points()
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gan": (gan, (X, NOISE)),
    "critic_gan": (critic_gan, (X, NOISE)),
    "spectral_gan": (spectral_gan, (X, NOISE)),
    "distiller": (distiller, (X, Y)),
    "averaged": (averaged, (X, Y)),
    "own": (own, (X, Y)),
    "annealed": (annealed, (X, Y)),
    "stateful": (stateful, (X[:, :, None], Y)),
}
"""Functions that make the models, and the data to train them on."""


def optimizer_variables(model: Any) -> list[Any]:
    """Returns the variables of all optimizers of a model."""
    optimizers = [getattr(model, name, None) for name in ("optimizer", "d_optimizer", "g_optimizer")]
    return [variable for optimizer in optimizers if optimizer for variable in optimizer.variables]


def train(case: str, mode: str) -> dict[str, Any]:
    """Trains a case; returns its results, or the code with which it is refused."""
    keras.utils.set_random_seed(11)
    build, arrays = CASES[case]
    in_cluster = "TF_CONFIG" in os.environ

    def batches(shard: Any) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(arrays).shard(shard.count, shard.index)
        return examples.batch(BATCH if in_cluster else 2 * BATCH)

    with tfdist.scope():
        model = build()
    if not in_cluster:
        history = model.fit(batches(tfdist.Shard()), epochs=2, verbose=0)
    else:
        try:
            history = tfdist.fit(model, batches, epochs=2, updates=tfdist.Updates(mode=mode))
        except TrainingError as error:
            return {"refused": error.code}
    found = {"weights": model.variables, "optimizers": optimizer_variables(model)}
    written = {name: [variable.numpy().tolist() for variable in group] for name, group in found.items()}
    return {**written, "history": history.history}


if __name__ == "__main__":
    print(json.dumps({case: train(case, sys.argv[1]) for case in sys.argv[2:]}))
