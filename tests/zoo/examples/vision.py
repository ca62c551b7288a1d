"""Models of Keras's examples of images and points: transformers of patches, text in images, pairs, views, rays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import EXAMPLES, adam, case, floats, labels, random

OWN_BATCH = "each worker normalizes by its own batch"


def _photos(size: int = 16) -> np.ndarray:
    """Pixels of three colors, as integers of one byte."""
    return random().integers(0, 256, (EXAMPLES, size, size, 3)).astype(np.uint8)


def _photos_of_classes() -> Any:
    return _photos(), labels()


def _classifier(inputs: Any, features: Any) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(3, dtype="float32")(features))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy")
    model.compile(adam(), loss, metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy"), top])
    return model


class Patches(layers.Layer):
    """Cuts images into squares."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def call(self, images: Any) -> Any:
        cut = ops.image.extract_patches(images, self.size)
        return ops.reshape(cut, (-1, cut.shape[1] * cut.shape[2], self.size**2 * images.shape[-1]))


class PatchEncoder(layers.Layer):
    """Projects patches, and adds an embedding of their positions."""

    def __init__(self, patches: int, size: int) -> None:
        super().__init__()
        self.patches = patches
        self.projection, self.position = layers.Dense(size), layers.Embedding(patches, size)

    def call(self, patches: Any) -> Any:
        return self.projection(patches) + self.position(ops.expand_dims(ops.arange(self.patches), 0))


def _transformed(x: Any, size: int) -> Any:
    seen = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.MultiHeadAttention(2, size)(seen, seen), x])
    wide = layers.Dense(size, "gelu")(layers.Dense(2 * size, "gelu")(layers.LayerNormalization(epsilon=1e-6)(x)))
    return layers.Add()([wide, x])


@case(
    _photos_of_classes,
    policy="mixed_float16",
    tolerance=1e-2,
    why="float16 has 11 bits",
    example="vision/image_classification_with_vision_transformer",
)
def patches_and_transformers():
    inputs = keras.Input((16, 16, 3))
    augmentation = keras.Sequential([layers.Normalization(), layers.Resizing(12, 12)])
    augmentation.layers[0].adapt(_photos())
    x = PatchEncoder(9, 8)(Patches(4)(augmentation(inputs)))
    x = layers.LayerNormalization(epsilon=1e-6)(_transformed(_transformed(x, 8), 8))
    return _classifier(inputs, layers.Dense(8, "gelu")(layers.Flatten()(x)))


class WindowAttention(layers.Layer):
    """Attention within windows of 2 × 2 patches, which may be shifted, with a bias of relative positions."""

    def __init__(self, side: int, size: int, heads: int, shift: int) -> None:
        super().__init__()
        self.side, self.size, self.heads, self.shift = side, size, heads, shift
        self.qkv, self.out = layers.Dense(3 * size), layers.Dense(size)

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=(9, self.heads), initializer="zeros", name="bias")
        places = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij")).reshape(2, -1)
        relative = places[:, :, None] - places[:, None, :] + 1
        self.index = self.add_weight(
            shape=(4, 4), dtype="int32", trainable=False, name="index",
            initializer=lambda shape, dtype: ops.convert_to_tensor(relative[0] * 3 + relative[1], dtype),
        )  # fmt: skip
        regions = np.add.outer(*2 * [np.repeat([0, 1, 2], [self.side - 2, 1, 1])]).astype(np.float32)
        cut = self._windows(regions[None, :, :, None])[..., 0]
        self.unseen = np.where(np.array(cut[:, None, :] != cut[:, :, None]), -100.0, 0.0) if self.shift else None

    def _windows(self, x: Any) -> Any:
        half = self.side // 2
        x = ops.transpose(ops.reshape(x, (-1, half, 2, half, 2, x.shape[-1])), (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, 4, x.shape[-1]))

    def _whole(self, x: Any) -> Any:
        half = self.side // 2
        x = ops.transpose(ops.reshape(x, (-1, half, half, 2, 2, self.size)), (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, self.side, self.side, self.size))

    def call(self, x: Any) -> Any:
        x = self._windows(ops.roll(x, (-self.shift, -self.shift), axis=(1, 2)))
        qkv = ops.reshape(self.qkv(x), (-1, 4, 3, self.heads, self.size // self.heads))
        query, key, value = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)
        weights = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * (self.size // self.heads) ** -0.5
        bias = ops.take(self.bias, ops.reshape(self.index, (-1,)), axis=0)
        weights = weights + ops.transpose(ops.reshape(bias, (4, 4, self.heads)), (2, 0, 1))
        if self.unseen is not None:
            each = ops.reshape(weights, (-1, len(self.unseen), self.heads, 4, 4))
            weights = ops.reshape(each + self.unseen[:, None], (-1, self.heads, 4, 4))
        seen = ops.transpose(ops.matmul(ops.softmax(weights), value), (0, 2, 1, 3))
        x = self._whole(self.out(ops.reshape(seen, (-1, 4, self.size))))
        return ops.roll(x, (self.shift, self.shift), axis=(1, 2))


@case(
    lambda: (_photos() / np.float32(255), np.eye(3, dtype=np.float32)[labels()]),
    example="vision/swin_transformers",
)
def shifted_windows():
    inputs = keras.Input((16, 16, 3))
    x = layers.Reshape((4, 4, 8))(PatchEncoder(16, 8)(Patches(4)(inputs)))
    for shift in (0, 1):
        x = x + WindowAttention(4, 8, 2, shift)(layers.LayerNormalization(epsilon=1e-5)(x))
        x = x + layers.Dense(8)(layers.Dense(16, "gelu")(layers.LayerNormalization(epsilon=1e-5)(x)))
    merged = ops.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], axis=-1)
    x = layers.Dense(8, use_bias=False)(ops.reshape(merged, (-1, 4, 32)))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        losses.CategoricalCrossentropy(label_smoothing=0.1),
        metrics=["accuracy"],
    )
    return model


@case(_photos_of_classes, copies=True, why=OWN_BATCH, example="vision/convmixer")
def convolutional_mixer():
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 4, strides=4)(layers.Rescaling(1 / 255)(inputs))
    x = layers.BatchNormalization()(layers.Activation("gelu")(x))
    for _ in range(2):
        mixed = layers.BatchNormalization()(layers.Activation("gelu")(layers.DepthwiseConv2D(3, padding="same")(x)))
        x = layers.Conv2D(8, 1)(layers.Add()([mixed, x]))
        x = layers.BatchNormalization()(layers.Activation("gelu")(x))
    return _classifier(inputs, layers.GlobalAveragePooling2D()(x))


class SuperResolution(keras.Model):
    """Has the train step of Keras's guide, with the compiled loss and metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def psnr(y_true: Any, y_pred: Any) -> Any:
    """The peak signal-to-noise ratio of each image."""
    return tf.image.psnr(y_true, y_pred, max_val=255)


@case(
    lambda: (_photos(6), random().integers(0, 256, (EXAMPLES, 12, 12, 3)).astype(np.float32)),
    scored=8,
    tolerance=1e-4,
    why="squares of gradients of numbers up to 255",
    example="vision/edsr",
)
def super_resolution():
    inputs = keras.Input((6, 6, 3))
    start = layers.Conv2D(4, 3, padding="same")(layers.Rescaling(1 / 255)(inputs))
    x = start
    for _ in range(2):
        y = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(4, 3, padding="same")(x))
        x = layers.Add()([x, layers.Conv2D(4, 3, padding="same")(y)])
    x = layers.Conv2D(16, 3, padding="same")(layers.Add()([x, start]))
    x = layers.Lambda(lambda value: tf.nn.depth_to_space(value, 2))(x)
    model = SuperResolution(inputs, layers.Rescaling(255.0)(layers.Conv2D(3, 3, padding="same")(x)))
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([5], [1e-3, 5e-4])
    model.compile(keras.optimizers.Adam(schedule, epsilon=1e-4), "mae", metrics=[psnr])
    return model


class Distances(layers.Layer):
    """The distances of an anchor from a similar image and from another one."""

    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        return tuple(ops.sum(ops.square(anchor - other), -1) for other in (positive, negative))


class Siamese(keras.Model):
    """Learns from three images, without targets, by a train step and a test step of its own."""

    def __init__(self, network: keras.Model, margin: float) -> None:
        super().__init__()
        self.network, self.margin = network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, images: Any) -> Any:
        return self.network(images)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(self._loss(data))
        return {"loss": self.loss_tracker.result()}

    def _loss(self, data: Any) -> Any:
        near, far = self.network(data)
        return ops.mean(ops.maximum(near - far + self.margin, 0.0))

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


@case(
    lambda: (_photos(8), _photos(8)[::-1].copy(), np.roll(_photos(8), 5, axis=0)),
    scored=8,
    example="vision/siamese_network",
)
def triplets_of_images():
    base = keras.Sequential([
        keras.Input((8, 8, 3)), layers.Rescaling(1 / 255),
        layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization(), layers.Conv2D(4, 3, activation="relu"),
    ])  # fmt: skip
    for layer in base.layers[:-1]:
        layer.trainable = False
    inputs = keras.Input((8, 8, 3))
    embedding = keras.Model(inputs, layers.Dense(4)(layers.Dense(8, "relu")(layers.Flatten()(base(inputs)))))
    images = [keras.Input((8, 8, 3), name=name) for name in ("anchor", "positive", "negative")]
    model = Siamese(keras.Model(images, Distances()(*map(embedding, images))), 0.5)
    model.compile(adam())
    return model


class Orthogonal(keras.regularizers.Regularizer):
    """Punishes matrices that are not orthogonal."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Any) -> Any:
        x = ops.reshape(x, (-1, self.size, self.size))
        return ops.sum(1e-3 * ops.square(ops.matmul(x, ops.transpose(x, (0, 2, 1))) - ops.eye(self.size)))


def _turned(points: Any, size: int) -> Any:
    x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(8, 1)(points)))
    matrix = layers.Dense(
        size**2,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(np.eye(size).ravel()),
        activity_regularizer=Orthogonal(size),
    )(layers.GlobalMaxPooling1D()(x))
    return layers.Dot(axes=(2, 1))([points, layers.Reshape((size, size))(matrix)])


@case(lambda: (floats(12, 3), labels()), copies=True, why=OWN_BATCH, example="vision/pointnet")
def clouds_of_points():
    inputs = keras.Input((12, 3))
    x = layers.Conv1D(4, 1, activation="relu")(_turned(inputs, 3))
    return _classifier(inputs, layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1)(_turned(x, 4))))


class RadianceField(keras.Model):
    """Renders rays through a field of colors and densities, and compares the images."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network

    def compile(self, optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.optimizer, self.loss_fn = optimizer, loss_fn
        self.loss_tracker, self.psnr_metric = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="psnr")

    def _render(self, rays: Any, distances: Any, training: bool) -> Any:
        found = self.network(rays, training=training)
        colors, density = ops.sigmoid(found[..., :-1]), ops.relu(found[..., -1])
        steps = ops.concatenate([distances[..., 1:] - distances[..., :-1], 0 * distances[..., :1] + 1e3], axis=-1)
        opacity = 1.0 - ops.exp(-density * steps)
        passed = tf.math.cumprod(1.0 - opacity + 1e-10, axis=-1, exclusive=True)
        return ops.sum((opacity * passed)[..., None] * colors, axis=-2)

    def _scores(self, image: Any, rendered: Any, loss: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(loss)
        self.psnr_metric.update_state(tf.image.psnr(image[:, None], rendered[:, None], max_val=1.0))
        return {"loss": self.loss_tracker.result(), "psnr": self.psnr_metric.result()}

    def train_step(self, data: Any) -> dict[str, Any]:
        image, (rays, distances) = data
        with tf.GradientTape() as tape:
            rendered = self._render(rays, distances, True)
            loss = self.loss_fn(image, rendered)
        gradients = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_variables, strict=True))
        return self._scores(image, rendered, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        image, (rays, distances) = data
        rendered = self._render(rays, distances, False)
        return self._scores(image, rendered, self.loss_fn(image, rendered))

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.psnr_metric]


def _rays() -> Any:
    distances = np.sort(random().uniform(2, 6, (EXAMPLES, 5)), axis=1).astype(np.float32)
    image = random().uniform(size=(EXAMPLES, 7, 3)).astype(np.float32)
    return image, (floats(7, 5, 6), np.repeat(distances[:, None], 7, axis=1))


@case(_rays, scored=8, example="vision/nerf")
def radiance_field():
    inputs = keras.Input((7, 5, 6))
    x = inputs
    for number in range(3):
        x = layers.Dense(8, "relu")(x)
        x = layers.concatenate([x, inputs], axis=-1) if number == 1 else x
    model = RadianceField(keras.Model(inputs, layers.Dense(4)(x)))
    model.compile(adam(), losses.MeanSquaredError())
    return model
