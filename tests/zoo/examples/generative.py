"""Models of Keras's examples of generation: autoencoders, adversaries, diffusion, flows, text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import EXAMPLES, ONE_UPDATE, adam, case, floats, integers, random, sgd

LATENT = 4


def _images(size: int = 8, colors: int = 1) -> np.ndarray:
    return random().uniform(size=(EXAMPLES, size, size, colors)).astype(np.float32)


class Scored(keras.Model):
    """A model whose metrics are its trackers of losses."""

    trackers: tuple[str, ...] = ()

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.loss_trackers = [keras.metrics.Mean(name=name) for name in self.trackers]

    @property
    def metrics(self) -> list[Any]:
        return self.loss_trackers

    def scores(self, *values: Any) -> dict[str, Any]:
        for tracker, value in zip(self.loss_trackers, values, strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.loss_trackers}


class Sampling(layers.Layer):
    """Draws from a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class VariationalAutoencoder(Scored):
    """An encoder and a decoder, three losses and one update."""

    trackers = ("total_loss", "reconstruction_loss", "kl_loss")

    def __init__(self, encoder: keras.Model, decoder: keras.Model) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance, drawn = self.encoder(data)
            difference = losses.binary_crossentropy(data, self.decoder(drawn))
            reconstruction = ops.mean(ops.sum(difference, axis=(1, 2)))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            divergence = ops.mean(ops.sum(divergence, axis=1))
            total = reconstruction + divergence
        grads = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return self.scores(total, reconstruction, divergence)


@case(_images, scored=0, example="generative/vae")
def drawn_digits():
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(8, "relu")(layers.Flatten()(layers.Conv2D(4, 3, strides=2, padding="same")(inputs)))
    mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
    encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])])
    decoder = keras.Sequential([
        keras.Input((2,)), layers.Dense(64, "relu"), layers.Reshape((4, 4, 4)),
        layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"),
    ])  # fmt: skip
    model = VariationalAutoencoder(encoder, decoder)
    model.compile(adam())
    return model


def _generator(inputs: int, colors: int = 1) -> keras.Model:
    return keras.Sequential([
        keras.Input((inputs,)), layers.Dense(64), layers.LeakyReLU(negative_slope=0.2), layers.Reshape((4, 4, 4)),
        layers.Conv2DTranspose(colors, 4, strides=2, padding="same", activation="sigmoid"),
    ])  # fmt: skip


def _discriminator(colors: int = 1) -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, colors)), layers.Conv2D(4, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2), layers.Flatten(), layers.Dense(1),
    ])  # fmt: skip


class Adversaries(Scored):
    """A generator and a discriminator with an optimizer each, and noise of the model's own."""

    trackers = ("d_loss", "g_loss")

    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = losses.BinaryCrossentropy(from_logits=True)

    def noise(self, size: Any) -> Any:
        return keras.random.normal((size, LATENT), seed=self.seed_generator)

    def train_step(self, images: Any) -> dict[str, Any]:
        size = ops.shape(images)[0]
        combined = ops.concatenate([self.generator(self.noise(size)), images], axis=0)
        classes = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(classes, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = self.noise(size)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((size, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return self.scores(d_loss, g_loss)


@case(_images, scored=0, refused=ONE_UPDATE, example="generative/dcgan_overriding_train_step")
def adversaries():
    model = Adversaries(_discriminator(), _generator(LATENT))
    model.compile(adam(), adam())
    return model


class Critic(Scored):
    """A Wasserstein GAN with a gradient penalty, whose critic makes several updates for one of the generator."""

    trackers = ("d_loss", "g_loss")

    def __init__(self, discriminator: keras.Model, generator: keras.Model, steps: int) -> None:
        super().__init__()
        self.discriminator, self.generator, self.d_steps = discriminator, generator, steps
        self.seed_generator = keras.random.SeedGenerator(5)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def penalty(self, real: Any, fake: Any) -> Any:
        share = keras.random.uniform((ops.shape(real)[0], 1, 1, 1), seed=self.seed_generator)
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            found = self.discriminator(between, training=True)
        slope = ops.sqrt(ops.sum(ops.square(tape.gradient(found, between)), axis=(1, 2, 3)) + 1e-12)
        return ops.mean(ops.square(slope - 1.0))

    def train_step(self, images: Any) -> dict[str, Any]:
        size = ops.shape(images)[0]
        for _ in range(self.d_steps):
            noise = keras.random.normal((size, LATENT), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                d_loss = ops.mean(self.discriminator(fake, training=True))
                d_loss -= ops.mean(self.discriminator(images, training=True))
                d_loss += 10.0 * self.penalty(images, fake)
            weights = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = keras.random.normal((size, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(noise, training=True), training=True))
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return self.scores(d_loss, g_loss)


@case(_images, scored=0, refused=ONE_UPDATE, example="generative/wgan_gp")
def critic_and_generator():
    model = Critic(_discriminator(), _generator(LATENT), 3)
    model.compile(*(keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9, epsilon=1e-4) for _ in range(2)))
    return model


class Cycle(Scored):
    """Two generators and two discriminators, whose gradients come from one tape, and an optimizer for each."""

    trackers = ("G_loss", "F_loss", "D_X_loss", "D_Y_loss")

    def __init__(self) -> None:
        super().__init__()
        self.gen_G, self.gen_F, self.disc_X, self.disc_Y = (_mapped(3), _mapped(3), _mapped(1), _mapped(1))

    def compile(self, optimizers: list[Any]) -> None:
        super().compile()
        self.gen_G_optimizer, self.gen_F_optimizer, self.disc_X_optimizer, self.disc_Y_optimizer = optimizers

    def train_step(self, data: Any) -> dict[str, Any]:
        real_x, real_y = data
        one, square = losses.MeanAbsoluteError(), losses.MeanSquaredError()

        def real(found: Any) -> Any:
            return square(ops.ones_like(found), found)

        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_G(real_x, training=True), self.gen_F(real_y, training=True)
            cycled_x, cycled_y = self.gen_F(fake_y, training=True), self.gen_G(fake_x, training=True)
            found_x = [self.disc_X(each, training=True) for each in (real_x, fake_x)]
            found_y = [self.disc_Y(each, training=True) for each in (real_y, fake_y)]
            g_loss = real(found_y[1]) + 10 * one(real_y, cycled_y) + 5 * one(real_y, self.gen_G(real_y, training=True))
            f_loss = real(found_x[1]) + 10 * one(real_x, cycled_x) + 5 * one(real_x, self.gen_F(real_x, training=True))
            d_x, d_y = ((real(each[0]) + square(0.0 * each[1], each[1])) * 0.5 for each in (found_x, found_y))
        parts = ("gen_G", g_loss), ("gen_F", f_loss), ("disc_X", d_x), ("disc_Y", d_y)
        gradients = [tape.gradient(loss, getattr(self, name).trainable_variables) for name, loss in parts]
        for (name, _), grads in zip(parts, gradients, strict=True):
            pairs = zip(grads, getattr(self, name).trainable_variables, strict=True)
            getattr(self, f"{name}_optimizer").apply_gradients(pairs)
        return self.scores(g_loss, f_loss, d_x, d_y)


def _mapped(colors: int) -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, 3)), layers.Conv2D(4, 3, padding="same"), layers.GroupNormalization(groups=-1),
        layers.LeakyReLU(negative_slope=0.2), layers.Conv2D(colors, 3, padding="same"),
    ])  # fmt: skip


@case(
    lambda: (_images(8, 3), _images(8, 3)[::-1].copy()),
    scored=0,
    refused=ONE_UPDATE,
    example="generative/cyclegan",
)
def cycles_of_images():
    model = Cycle()
    model.compile([keras.optimizers.Adam(2e-4, beta_1=0.5, epsilon=1e-4) for _ in range(4)])
    return model


class Diffusion(Scored):
    """Removes noise from images. A second network follows by a moving average, and is used to score."""

    trackers = ("n_loss", "i_loss")

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = _unet()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        self.seeds = keras.random.SeedGenerator(3)

    def rates(self, times: Any) -> Any:
        angles = np.arccos(0.95) + times * (np.arccos(0.02) - np.arccos(0.95))
        return ops.sin(angles), ops.cos(angles)

    def losses_of(self, images: Any, training: bool) -> Any:
        images = self.normalizer(images, training=training)
        noises = keras.random.normal(ops.shape(images), seed=self.seeds)
        noise, signal = self.rates(keras.random.uniform((ops.shape(images)[0], 1, 1, 1), seed=self.seeds))
        noisy = signal * images + noise * noises
        network = self.network if training else self.ema_network
        found = network([noisy, noise**2], training=training)
        return self.loss(noises, found), self.loss(images, (noisy - noise * found) / signal)

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.losses_of(images, True)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(noise_loss, weights), weights, strict=True))
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return self.scores(noise_loss, image_loss)

    def test_step(self, images: Any) -> dict[str, Any]:
        return self.scores(*self.losses_of(images, False))


@keras.saving.register_keras_serializable("zoo")
def _waves(x: Any) -> Any:
    speeds = (2 * np.pi * np.exp(np.linspace(0.0, np.log(100.0), 2))).astype(np.float32)
    return ops.concatenate([ops.sin(speeds * x), ops.cos(speeds * x)], axis=3)


def _unet() -> keras.Model:
    images, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    time = layers.UpSampling2D(8)(layers.Lambda(_waves, output_shape=(1, 1, 4))(variances))
    first = layers.Concatenate()([layers.Conv2D(4, 1)(images), time])
    x = layers.GroupNormalization(2, center=False, scale=False)(layers.AveragePooling2D(2)(first))
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    x = layers.Concatenate()([layers.UpSampling2D(interpolation="bilinear")(x), first])
    return keras.Model([images, variances], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


def _mean_absolute_error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred))


@case(_images, scored=8, refused=ONE_UPDATE, example="generative/ddim")
def diffusion():
    model = Diffusion()
    model.normalizer.adapt(_images())
    model.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-4, epsilon=1e-4), _mean_absolute_error)
    return model


class VectorQuantizer(layers.Layer):
    """Replaces vectors by the nearest ones of a code book; gradients pass straight through."""

    def __init__(self, codes: int, size: int, beta: float = 0.25) -> None:
        super().__init__()
        self.codes, self.size, self.beta = codes, size, beta
        self.book = self.add_weight(shape=(size, codes), initializer="random_uniform", name="book")

    def call(self, x: Any) -> Any:
        flat = ops.reshape(x, (-1, self.size))
        distances = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.book**2, axis=0)
        nearest = ops.argmin(distances - 2 * ops.matmul(flat, self.book), axis=1)
        found = ops.matmul(ops.one_hot(nearest, self.codes), ops.transpose(self.book))
        found = ops.reshape(found, ops.shape(x))
        self.add_loss(self.beta * ops.mean((ops.stop_gradient(found) - x) ** 2))
        self.add_loss(ops.mean((found - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(found - x)


class QuantizedAutoencoder(Scored):
    """Adds the losses of its layers in its train step."""

    trackers = ("loss", "reconstruction_loss", "vq_loss")

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.variance = variance
        inputs = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
        x = VectorQuantizer(8, 4)(layers.Conv2D(4, 1)(x))
        self.vqvae = keras.Model(inputs, layers.Conv2DTranspose(1, 3, strides=2, padding="same")(x))

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            reconstruction = ops.mean((x - self.vqvae(x)) ** 2) / self.variance
            total = reconstruction + sum(self.vqvae.losses)
        grads = tape.gradient(total, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables, strict=True))
        return self.scores(total, reconstruction, sum(self.vqvae.losses))


@case(_images, scored=0, example="generative/vq_vae")
def quantized_vectors():
    model = QuantizedAutoencoder(0.5)
    model.compile(adam())
    return model


class MaskedConvolution(layers.Layer):
    """A convolution that sees earlier pixels only. As in the example, `call` assigns the masked kernel."""

    def __init__(self, kind: str, **given: Any) -> None:
        super().__init__()
        self.kind, self.conv = kind, layers.Conv2D(**given)

    def build(self, shape: Any) -> None:
        self.conv.build(shape)
        kernel = self.conv.kernel.shape
        self.mask = np.zeros(kernel, np.float32)
        self.mask[: kernel[0] // 2] = 1.0
        self.mask[kernel[0] // 2, : kernel[1] // 2 + (self.kind == "B")] = 1.0

    def call(self, x: Any) -> Any:
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(x)


@case(
    lambda: 2 * (np.round(_images()),),
    refused={"": "assigns-trainable-variable"} | ONE_UPDATE,
    why="the layer assigns its kernel before it is used, beside the optimizer",
    example="generative/pixelcnn",
)
def masked_convolutions():
    inputs = keras.Input((8, 8, 1))
    x = MaskedConvolution("A", filters=4, kernel_size=7, padding="same", activation="relu")(inputs)
    inner = MaskedConvolution("B", filters=4, kernel_size=3, padding="same", activation="relu")(layers.ReLU()(x))
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(layers.add([x, inner])))
    model.compile(adam(), "binary_crossentropy")
    return model


class Flow(Scored):
    """Maps points to a normal distribution by coupled, invertible layers (RealNVP)."""

    trackers = ("loss",)

    def __init__(self, couplings: int) -> None:
        super().__init__()
        self.masks = np.array([[0, 1], [1, 0]] * (couplings // 2), np.float32)
        self.layers_list = [self._coupling() for _ in range(couplings)]

    def _coupling(self) -> keras.Model:
        inputs = keras.Input((2,))
        rule = {"kernel_regularizer": keras.regularizers.l2(0.01)}
        shift, scale = (layers.Dense(8, "relu", **rule)(inputs) for _ in range(2))
        return keras.Model(inputs, [layers.Dense(2, "tanh", **rule)(scale), layers.Dense(2, **rule)(shift)])

    def call(self, x: Any) -> Any:
        determinant = ops.zeros_like(x[:, 0])
        for mask, layer in zip(self.masks[::-1], self.layers_list[::-1], strict=True):
            kept = x * mask
            scale, shift = (each * (1 - mask) for each in layer(kept))
            x = (1 - mask) * (x * ops.exp(-scale) - shift * ops.exp(-scale)) + kept
            determinant -= ops.sum(scale, axis=1)
        return x, determinant

    def log_loss(self, x: Any) -> Any:
        y, determinant = self(x)
        return -ops.mean(-0.5 * ops.sum(y**2, axis=1) - np.float32(np.log(2 * np.pi)) + determinant)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        g = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.trainable_variables, strict=True))
        return self.scores(loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.scores(self.log_loss(data))


@case(lambda: floats(2), scored=8, example="generative/real_nvp")
def flow():
    model = Flow(4)
    model.compile(optimizer=adam())
    return model


class Generates(keras.callbacks.Callback):
    """Continues a text after each epoch, by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[int]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        text = [1, 2]
        for place in range(1, 5):
            given = np.array([text + [0] * (6 - len(text))])
            found, _ = self.model.predict(given, verbose=0)
            text.append(int(np.argmax(found[0][place])))
        self.texts.append(text)


def _texts() -> Any:
    ids = integers(20, 7)
    return ids[:, :-1], ids[:, 1:]


@case(
    _texts,
    fit=lambda: {"callbacks": [Generates()]},
    example="generative/text_generation_with_miniature_gpt",
)
def miniature_gpt():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(inputs) + layers.Embedding(6, 8)(ops.arange(6))
    places = ops.arange(6)
    mask = ops.expand_dims(ops.cast(places[:, None] >= places, "int32"), 0)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(2, 8)(x, x, attention_mask=mask))
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(8)(layers.Dense(8, "relu")(x)))
    model = keras.Model(inputs, [layers.Dense(20)(x), x])
    model.compile(sgd(), loss=[losses.SparseCategoricalCrossentropy(from_logits=True), None])
    return model
