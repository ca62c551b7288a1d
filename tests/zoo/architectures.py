"""Small models with the architectures of Keras's examples, and features of their training loops."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import (
    BATCH,
    CLASSES,
    EXAMPLES,
    ONE_LAYER,
    Case,
    add_case,
    case,
    classifier,
    floats,
    images,
    integers,
    labels,
    numbers,
    random,
    sequences,
    sgd,
    tokens,
    vectors,
    words,
)

WORDS = 20


def _positions(x: Any, size: int) -> Any:
    length = x.shape[1]
    return x + layers.Embedding(length, size)(ops.arange(length))


def _block(x: Any, *, rate: float = 0.0, mask: Any = None, causal: bool = False) -> Any:
    size = x.shape[-1]
    seen = layers.MultiHeadAttention(2, size // 2, dropout=rate)(x, x, attention_mask=mask, use_causal_mask=causal)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(rate)(seen))
    wide = layers.Dense(2 * size, "gelu")(x)
    return layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(rate)(layers.Dense(size)(wide)))


def _transformer(rate: float) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    x = _positions(layers.Embedding(WORDS, 8)(inputs), 8)
    x = _block(_block(x, rate=rate), rate=rate)
    return classifier(inputs, layers.GlobalAveragePooling1D()(x), keras.optimizers.SGD(0.05))


add_case("transformer_classifier", Case(lambda: _transformer(0.0), tokens))
add_case("transformer_classifier_with_dropout", Case(lambda: _transformer(0.1), tokens))


def texts() -> Any:
    ids = integers(WORDS, 7)
    return ids[:, :-1], ids[:, 1:]


@case(texts)
def language_model():
    inputs = keras.Input((6,), dtype="int32")
    x = _block(_positions(layers.Embedding(WORDS, 8)(inputs), 8), causal=True)
    model = keras.Model(inputs, layers.Dense(WORDS)(x))
    model.compile(
        keras.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


class Tied(keras.Model):
    """A language model whose output layer shares the table of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(WORDS, 8)
        self.norm = layers.LayerNormalization()
        self.hidden = layers.Dense(8, "gelu")

    def call(self, ids: Any) -> Any:
        x = self.norm(self.hidden(self.table(ids)))
        return ops.matmul(x, ops.transpose(self.table.embeddings))


@case(texts)
def tied_weights():
    model = Tied()
    model.compile(sgd(), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@case(images)
def vision_transformer():
    inputs = keras.Input((8, 8, 3))
    patches = layers.Conv2D(8, 4, strides=4)(layers.Rescaling(1 / 255)(inputs))
    x = _positions(layers.Reshape((4, 8))(patches), 8)
    return classifier(inputs, layers.Flatten()(_block(x)), keras.optimizers.SGD(0.05))


def translations() -> Any:
    source, target = tokens()[0], integers(WORDS - 1, 5) + 1
    return {"source": source, "target": target[:, :-1]}, target[:, 1:]


def _seq2seq(kind: Any, rate: float) -> keras.Model:
    source = keras.Input((6,), dtype="int32", name="source")
    target = keras.Input((4,), dtype="int32", name="target")
    table = layers.Embedding(WORDS, 4, mask_zero=True)
    _, *state = kind(5, return_state=True, dropout=rate)(table(source))
    x = kind(5, return_sequences=True, dropout=rate)(table(target), initial_state=state)
    model = keras.Model({"source": source, "target": target}, layers.Dense(WORDS)(x))
    model.compile(sgd(), losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


add_case("seq2seq_gru", Case(lambda: _seq2seq(layers.GRU, 0.0), translations))
add_case("seq2seq_lstm", Case(lambda: _seq2seq(layers.LSTM, 0.0), translations))
add_case("seq2seq_gru_with_dropout", Case(lambda: _seq2seq(layers.GRU, 0.2), translations))


@case(translations)
def seq2seq_with_attention():
    source = keras.Input((6,), dtype="int32", name="source")
    target = keras.Input((4,), dtype="int32", name="target")
    encoded = layers.Bidirectional(layers.GRU(4, return_sequences=True), merge_mode="sum")(
        layers.Embedding(WORDS, 4, mask_zero=True)(source)
    )
    x = layers.GRU(4, return_sequences=True)(layers.Embedding(WORDS, 4)(target))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(query=x, value=encoded))
    model = keras.Model({"source": source, "target": target}, layers.Dense(WORDS)(x))
    model.compile(sgd(), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@case(
    lambda: (tokens()[0], floats(6, 1)),
    copies=True,
    why="each worker divides the loss by the number of unmasked time steps of its own batch",
)
def loss_of_masked_steps():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.LSTM(4, return_sequences=True)(layers.Embedding(WORDS, 4, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(sgd(), "mse")
    return model


@case(
    sequences,
    copies=True,
    scored=8,
    refused=dict.fromkeys(("async", "sync"), "stateful-layer"),
    why="a batch starts from the state of the one before it on the same worker",
)
def stateful_recurrent_layer():
    inputs = keras.Input((6, 4), batch_size=BATCH)
    return classifier(inputs, layers.LSTM(3, stateful=True)(inputs))


def pairs() -> Any:
    return {"left": floats(8), "right": floats(8)[::-1].copy()}, integers(2, 1)


class Distance(layers.Layer):
    """The distance of two vectors."""

    def call(self, some: Any, others: Any) -> Any:
        return ops.sqrt(ops.sum(ops.square(some - others), axis=1, keepdims=True) + 1e-6)


def contrastive(y_true: Any, y_pred: Any) -> Any:
    y_true = ops.cast(y_true, y_pred.dtype)
    return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * ops.square(ops.maximum(1 - y_pred, 0)), axis=-1)


@case(pairs)
def siamese():
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    tower = keras.Sequential([keras.Input((8,)), layers.Dense(6, "tanh"), layers.Dense(3)])
    model = keras.Model({"left": left, "right": right}, Distance()(tower(left), tower(right)))
    model.compile(sgd(), contrastive, metrics=["accuracy"])
    return model


class Triplet(keras.Model):
    """A two-tower model that computes its loss from a batch without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(3)])

    def call(self, x: Any) -> Any:
        anchor, near, far = (self.tower(x[:, part]) for part in range(3))
        return ops.stack([ops.sum(ops.square(anchor - near), -1), ops.sum(ops.square(anchor - far), -1)], axis=-1)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.maximum(y_pred[:, 0] - y_pred[:, 1] + 0.5, 0.0))


@case(lambda: (floats(3, 8),))
def triplet_with_a_loss_of_its_own():
    model = Triplet()
    model.compile(sgd())
    return model


class OwnLoss(keras.Model):
    """The example of `compute_loss` in Keras's documentation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracked")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y)) + ops.sum(ops.stack(self.losses))
        self.tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.tracker.reset_state()

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


@case(numbers, scored=2 * BATCH)
def own_compute_loss():
    inputs = keras.Input((8,))
    model = OwnLoss(inputs, layers.Dense(1, kernel_regularizer="l2")(layers.Dense(4, "tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.05))
    return model


@case(numbers, scored=2 * BATCH)
def own_compute_loss_and_adam():
    inputs = keras.Input((8,))
    model = OwnLoss(inputs, layers.Dense(1, kernel_regularizer="l2")(layers.Dense(4, "tanh")(inputs)))
    model.compile(keras.optimizers.Adam(0.01))
    return model


class Sampling(layers.Layer):
    """Draws from a normal distribution, and adds its KL divergence from the standard one to the loss."""

    def __init__(self, weight: float, **given: Any) -> None:
        super().__init__(**given)
        self.weight, self.seeds = weight, keras.random.SeedGenerator(5)

    def call(self, mean: Any, log_variance: Any) -> Any:
        divergence = -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(self.weight * divergence)
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Mean(Sampling):
    """Adds the KL divergence, and returns the mean instead of a sample."""

    def call(self, mean: Any, log_variance: Any) -> Any:
        self.add_loss(-0.5 * self.weight * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        return mean + log_variance


class Autoencoder(keras.Model):
    """A variational autoencoder that computes its own loss."""

    def __init__(self, latent: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(6, "tanh"), layers.Dense(8)
        self.mean, self.spread, self.latent = layers.Dense(2), layers.Dense(2), latent

    def call(self, x: Any) -> Any:
        hidden = self.encoder(x)
        out = self.decoder(self.latent(self.mean(hidden), self.spread(hidden)))
        self.add_loss(ops.mean(ops.square(out - x)))
        return out


def _autoencoder(latent: type[Sampling]) -> keras.Model:
    model = Autoencoder(latent(0.1))
    model.compile(keras.optimizers.SGD(0.1))
    return model


add_case("variational_autoencoder", Case(lambda: _autoencoder(Sampling), lambda: (floats(8),)))
add_case("autoencoder_with_added_losses", Case(lambda: _autoencoder(Mean), lambda: (floats(8),)))


class Endpoint(layers.Layer):
    """Keras's example of a layer that adds the loss with a loss object."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.loss = losses.MeanSquaredError()

    def call(self, targets: Any, predictions: Any) -> Any:
        self.add_loss(self.loss(targets, predictions))
        return predictions


@case(lambda: ({"x": floats(8), "targets": numbers()[1]},))
def endpoint_layer():
    x, targets = keras.Input((8,), name="x"), keras.Input((1,), name="targets")
    out = Endpoint()(targets, layers.Dense(1)(layers.Dense(4, "tanh")(x)))
    model = keras.Model({"x": x, "targets": targets}, out)
    model.compile(keras.optimizers.SGD(0.1))
    return model


def _speech() -> Any:
    return ({"sound": floats(6, 4), "text": random().integers(1, 4, (EXAMPLES, 2)).astype(np.int32)},)


class CTCLayer(layers.Layer):
    """Keras's example for speech and handwriting: a layer adds the CTC loss."""

    def call(self, text: Any, predicted: Any) -> Any:
        batch = ops.shape(text)[0]
        lengths = ops.cast(ops.shape(predicted)[1], "int32") * ops.ones((batch,), "int32")
        texts = ops.cast(ops.shape(text)[1], "int32") * ops.ones((batch,), "int32")
        self.add_loss(ops.mean(ops.ctc_loss(text, predicted, texts, lengths, mask_index=0)))
        return predicted


@case(_speech)
def ctc_in_a_layer():
    sound, text = keras.Input((6, 4), name="sound"), keras.Input((2,), dtype="int32", name="text")
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(sound)
    model = keras.Model({"sound": sound, "text": text}, CTCLayer()(text, layers.Dense(5)(x)))
    model.compile(sgd())
    return model


def features() -> Any:
    x = {"number": floats(4), "city": integers(6, 1), "color": integers(3, 1)}
    return x, integers(2, 1)


def _columns() -> dict[str, Any]:
    return {
        "number": keras.Input((4,), name="number"),
        "city": keras.Input((1,), dtype="int32", name="city"),
        "color": keras.Input((1,), dtype="int32", name="color"),
    }


def _binary(inputs: Any, features: Any, optimizer: Any = None) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(1)(features))
    loss = losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer or sgd(), loss, metrics=[keras.metrics.AUC(from_logits=True), "accuracy"])
    return model


@case(features)
def wide_and_deep():
    inputs = _columns()
    wide = layers.concatenate([
        layers.CategoryEncoding(6, output_mode="one_hot")(inputs["city"]),
        layers.CategoryEncoding(3, output_mode="one_hot")(inputs["color"]),
        inputs["number"],
    ])  # fmt: skip
    embedded = [layers.Flatten()(layers.Embedding(n, 3)(inputs[name])) for name, n in (("city", 6), ("color", 3))]
    deep = layers.Dense(6, "relu")(layers.concatenate([*embedded, inputs["number"]]))
    return _binary(inputs, layers.concatenate([wide, deep]))


class Cross(layers.Layer):
    """A layer of a deep and cross network."""

    def build(self, shapes: Any) -> None:
        self.dense = layers.Dense(shapes[0][-1])

    def call(self, both: Any) -> Any:
        start, x = both
        return start * self.dense(x) + x


@case(features)
def deep_and_cross():
    inputs = _columns()
    embedded = [layers.Flatten()(layers.Embedding(n, 3)(inputs[name])) for name, n in (("city", 6), ("color", 3))]
    start = layers.concatenate([*embedded, inputs["number"]])
    return _binary(inputs, Cross()((start, Cross()((start, start)))))


@case(features)
def tab_transformer():
    inputs = _columns()
    embedded = [layers.Embedding(n, 4)(inputs[name]) for name, n in (("city", 6), ("color", 3))]
    x = _block(layers.concatenate(embedded, axis=1))
    joined = layers.concatenate([layers.Flatten()(x), layers.LayerNormalization()(inputs["number"])])
    return _binary(inputs, layers.Dense(6, "selu")(joined), keras.optimizers.SGD(0.05))


def pictures() -> Any:
    return images()[0] / 255, integers(CLASSES, 8, 8)


@case(pictures)
def u_net():
    inputs = keras.Input((8, 8, 3))
    first = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    down = layers.Conv2D(6, 3, padding="same", activation="relu")(layers.MaxPooling2D()(first))
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(down)
    joined = layers.Conv2D(4, 3, padding="same", activation="relu")(layers.concatenate([first, up]))
    model = keras.Model(inputs, layers.Conv2D(CLASSES, 1)(joined))
    model.compile(sgd(), losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@case(lambda: (images()[0] / 255, images()[0] / 255))
def convolutional_autoencoder():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x))
    model.compile(sgd(), "mse")
    return model


@case(images, copies=True, why="each worker has statistics of its own batch")
def residual_network():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(layers.Rescaling(1 / 255)(inputs))
    for _ in range(2):
        y = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization(momentum=0.8)(y))
        x = layers.Add()([x, layers.SeparableConv2D(4, 3, padding="same")(y)])
    return classifier(inputs, layers.GlobalAveragePooling2D()(x), keras.optimizers.SGD(0.02))


@case(images)
def mixer():
    inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((4, 8))(layers.Conv2D(8, 4, strides=4)(layers.Rescaling(1 / 255)(inputs)))
    mixed = layers.Permute((2, 1))(layers.Dense(4, "gelu")(layers.Permute((2, 1))(layers.LayerNormalization()(x))))
    x = layers.Add()([x, mixed])
    x = layers.Add()([x, layers.Dense(8, "gelu")(layers.LayerNormalization()(x))])
    return classifier(inputs, layers.GlobalAveragePooling1D()(x), keras.optimizers.SGD(0.05))


def several() -> Any:
    x = {"text": tokens()[0], "extra": {"image": images()[0] / 255, "number": floats(4)}}
    return x, {"kind": labels(), "value": floats(1)}


@case(several, scored=2 * BATCH)
def dictionaries_of_inputs_and_outputs():
    inputs = {
        "text": keras.Input((6,), dtype="int32", name="text"),
        "extra": {"image": keras.Input((8, 8, 3), name="image"), "number": keras.Input((4,), name="number")},
    }
    x = layers.concatenate([
        layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 4)(inputs["text"])),
        layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(inputs["extra"]["image"])),
        inputs["extra"]["number"],
    ])  # fmt: skip
    model = keras.Model(inputs, {"kind": layers.Dense(CLASSES)(x), "value": layers.Dense(1)(x)})
    model.compile(
        sgd(),
        {"kind": losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"},
        metrics={"kind": ["accuracy"], "value": ["mae"]},
        loss_weights={"kind": 0.7, "value": 0.3},
    )
    return model


@case(vectors)
def nested_models():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(4, "tanh")], name="inner")
    middle_input = keras.Input((8,))
    middle = keras.Model(middle_input, layers.concatenate([inner(middle_input), layers.Dense(2)(middle_input)]))
    inputs = keras.Input((8,))
    return classifier(inputs, layers.add([middle(inputs), middle(inputs * 0.5)]))


@case(vectors, copies=True, why="each worker has statistics of its own batch")
def frozen_layers():
    inputs = keras.Input((8,))
    base = keras.Sequential([keras.Input((8,)), layers.Dense(6, "relu"), layers.BatchNormalization()])
    base.trainable = False
    return classifier(inputs, layers.BatchNormalization()(layers.Dense(4)(base(inputs))))


@case(vectors)
def all_layers_frozen():
    inputs = keras.Input((8,))
    model = classifier(inputs, layers.Dense(6, "relu")(inputs))
    model.trainable = False
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


@case(words)
def words_in_the_model():
    inputs = keras.Input((1,), dtype="string")
    lookup = layers.StringLookup()
    lookup.adapt(words()[0])
    x = layers.Embedding(lookup.vocabulary_size(), 4)(lookup(inputs))
    return classifier(inputs, layers.Flatten()(x))


class Recomputed(layers.Layer):
    """Recomputes its hidden values in the backward pass with `tf.recompute_grad`."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda value: tf.tanh(value @ tf.convert_to_tensor(self.kernel)))(x)


@case(vectors)
def recomputed_gradients():
    inputs = keras.Input((8,))
    return classifier(inputs, Recomputed()(layers.Dense(6)(inputs)))


class Rematerialized(Recomputed):
    """Recomputes its hidden values in the backward pass with `keras.remat`."""

    def call(self, x: Any) -> Any:
        return keras.remat(lambda value: ops.tanh(ops.matmul(value, self.kernel)))(x)


@case(vectors)
def rematerialized_layers():
    inputs = keras.Input((8,))
    return classifier(inputs, Rematerialized()(layers.Dense(6)(inputs)))


class Reversed(layers.Layer):
    """Reverses the gradient, as in domain-adversarial training."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def reverse(value: Any) -> Any:
            return tf.identity(value), lambda gradient: -0.5 * gradient

        return reverse(x) @ tf.convert_to_tensor(self.kernel)


@case(vectors)
def custom_gradients():
    inputs = keras.Input((8,))
    return classifier(inputs, Reversed()(layers.Dense(6, "tanh")(inputs)))


class Steps(layers.Layer):
    """Counts train steps and validation batches."""

    def build(self, shape: Any) -> None:
        kind = {"shape": (), "dtype": "int32", "initializer": "zeros", "trainable": False}
        self.steps, self.scored = self.add_weight(name="steps", **kind), self.add_weight(name="scored", **kind)

    def call(self, x: Any, training: bool = False) -> Any:
        (self.steps if training else self.scored).assign_add(1)
        return x


@case(vectors, scored=2 * BATCH)
def layer_that_counts_steps():
    inputs = keras.Input((8,))
    return classifier(inputs, Steps()(layers.Dense(4)(inputs)))


class Averaged(layers.Layer):
    """Keeps a moving mean of its inputs, as normalization layers do."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


@case(vectors, copies=True, why="each worker has the mean of its own batch")
def moving_mean_of_the_users_own():
    inputs = keras.Input((8,))
    return classifier(inputs, Averaged()(layers.Dense(4)(inputs)))


@case(tokens)
def control_flow():
    class Loop(layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(4, 4), name="kernel")

        def call(self, x: Any) -> Any:
            x = ops.fori_loop(0, 3, lambda _, value: ops.tanh(ops.matmul(value, self.kernel)), x)
            return ops.cond(ops.mean(self.kernel) > 0, lambda: x * 2.0, lambda: x)

    inputs = keras.Input((6,), dtype="int32")
    return classifier(inputs, Loop()(layers.Flatten()(layers.Embedding(WORDS, 4)(inputs))[:, :4]))


class Checked(layers.Layer):
    """Asserts that its input is not all zeros, and calls a Python function."""

    def call(self, x: Any) -> Any:
        tf.debugging.assert_greater(tf.reduce_sum(tf.abs(x)), 0.0)
        scale = tf.numpy_function(lambda value: np.float32(0.5) + 0 * value.mean(), [x], tf.float32, stateful=False)
        return x * tf.reshape(scale, [])


@case(vectors)
def python_code_in_the_model():
    inputs = keras.Input((8,))
    return classifier(inputs, layers.Dropout(0.0)(Checked()(layers.Dense(4)(inputs))))


@case(vectors)
def gated_experts():
    inputs = keras.Input((8,))
    experts = layers.Lambda(lambda parts: ops.stack(parts, axis=1))([layers.Dense(4, "tanh")(inputs) for _ in range(3)])
    gate = layers.Dense(3, "softmax")(inputs)
    return classifier(inputs, ops.einsum("be,bed->bd", gate, experts))


class Student(keras.Model):
    """Learns from a frozen teacher."""

    def __init__(self, teacher: keras.Model, student: keras.Model) -> None:
        super().__init__()
        teacher.trainable = False
        self.teacher, self.student = teacher, student

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        hard = super().compute_loss(x, y, y_pred, sample_weight)
        soft = ops.mean(losses.kl_divergence(ops.softmax(self.teacher(x)), ops.softmax(y_pred)))
        return 0.5 * hard + 0.5 * soft


def _dense() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(4, "tanh"), layers.Dense(CLASSES)])


@case(vectors)
def distillation_of_the_users_own():
    model = Student(_dense(), _dense())
    model.compile(keras.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@case(vectors, scored=2 * BATCH)
def distiller():
    model = keras.distillation.Distiller(
        teacher=_dense(), student=_dense(), distillation_losses=keras.distillation.LogitsDistillation(temperature=2.0)
    )
    model.compile(keras.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class OwnStep(keras.Model):
    """Overrides `train_step`."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@case(vectors, refused=ONE_LAYER)
def own_train_step():
    inputs = keras.Input((8,))
    model = OwnStep(inputs, layers.Dense(CLASSES)(inputs))
    model.compile(sgd(), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@case(sequences)
def wavenet():
    inputs = keras.Input((6, 4))
    x = layers.Conv1D(4, 2, padding="causal")(inputs)
    for dilation in (1, 2):
        gate = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="sigmoid")(x)
        x = layers.add([x, gate * layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="tanh")(x)])
    return classifier(inputs, layers.Flatten()(x))


@case(lambda: ({"user": integers(19, 1), "film": integers(17, 1)}, floats(1)))
def two_towers():
    user, film = keras.Input((1,), dtype="int32", name="user"), keras.Input((1,), dtype="int32", name="film")
    left = layers.Dense(3)(layers.Flatten()(layers.Embedding(19, 4, embeddings_regularizer="l2")(user)))
    right = layers.Dense(3)(layers.Flatten()(layers.Embedding(17, 4)(film)))
    model = keras.Model({"user": user, "film": film}, layers.Dot(axes=1)([left, right]))
    model.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=[keras.metrics.RootMeanSquaredError()])
    return model


@case(lambda: (floats(5, 4), integers(2, 5, 5).astype(np.float32), labels())[::2])
def graph_network():
    inputs = keras.Input((5, 4))
    edges = layers.Dense(5, "softmax")(inputs)
    x = layers.Dense(4, "relu")(ops.matmul(edges, inputs))
    return classifier(inputs, layers.GlobalMaxPooling1D()(layers.Dense(4)(ops.matmul(edges, x))))
