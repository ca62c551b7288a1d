"""Models of Keras's examples of text: vectorized strings, experts, translation, masked words, LoRA."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import EXAMPLES, case, integers, labels, random, sgd

WORDS = 20


def _sentences(length: int = 6) -> np.ndarray:
    """Texts of some words, with capitals, signs and marks of HTML."""
    known = np.array(["The", "cat<br />", "sat,", "on", "a", "mat!", "and", "slept", "where", "it"])
    counts = random().integers(length // 2, length + 1, EXAMPLES)
    return np.array([" ".join(row[:n]) for row, n in zip(known[integers(10, length)], counts, strict=True)])


def _plain(texts: Any) -> Any:
    return tf.strings.regex_replace(tf.strings.regex_replace(tf.strings.lower(texts), "<br />", " "), r"[!,.]", "")


def _vectorized(length: int) -> layers.TextVectorization:
    layer = layers.TextVectorization(WORDS, standardize=_plain, output_sequence_length=length)
    layer.adapt(_sentences(length))
    return layer


@case(lambda: (_sentences(), random().integers(0, 2, EXAMPLES)), example="nlp/text_classification_from_scratch")
def texts_to_classes():
    inputs = keras.Input((), dtype="string")
    x = layers.Embedding(WORDS, 8)(_vectorized(6)(inputs))
    x = layers.Conv1D(8, 3, strides=2, padding="valid", activation="relu")(x)
    x = layers.Dense(8, "relu")(layers.GlobalMaxPooling1D()(x))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(x))
    model.compile(sgd(), "binary_crossentropy", metrics=["accuracy"])
    return model


class PositionalEmbedding(layers.Layer):
    """Embeds tokens and their positions, and passes a mask of the padding on."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.length = layers.Embedding(WORDS, size), layers.Embedding(length, size), length

    def call(self, ids: Any) -> Any:
        return self.tokens(ids) + self.positions(ops.arange(self.length))

    def compute_mask(self, ids: Any, mask: Any = None) -> Any:
        return ops.not_equal(ids, 0)


class Router(layers.Layer):
    """Sends each token to its best expert, up to an expert's capacity, and adds a loss for an even use of experts."""

    def __init__(self, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity, self.route = experts, capacity, layers.Dense(experts)

    def call(self, tokens: Any) -> Any:
        chances = ops.softmax(self.route(tokens), axis=-1)
        gate, chosen = ops.top_k(chances, k=1)
        mask = ops.one_hot(ops.squeeze(chosen, -1), self.experts)
        self.add_loss(0.01 * self.experts * ops.sum(ops.mean(mask, axis=0) * ops.mean(chances, axis=0)))
        position = ops.cumsum(mask, axis=0) * mask
        mask = mask * ops.cast(position <= self.capacity, "float32")
        place = ops.cast(ops.sum(position * mask, axis=-1), "int32") - 1
        sent = ops.expand_dims(mask, -1) * ops.expand_dims(ops.one_hot(place, self.capacity), 1)
        return sent, sent * ops.expand_dims(gate, -1)


class Switch(layers.Layer):
    """A feed-forward layer of experts."""

    def __init__(self, experts: int, size: int, capacity: int) -> None:
        super().__init__()
        self.router = Router(experts, capacity)
        self.experts = [keras.Sequential([layers.Dense(size, "relu"), layers.Dense(size)]) for _ in range(experts)]

    def call(self, x: Any) -> Any:
        tokens = ops.reshape(x, (-1, x.shape[-1]))
        sent, returned = self.router(tokens)
        given = ops.einsum("td,tec->ecd", tokens, sent)
        made = ops.stack([expert(given[number]) for number, expert in enumerate(self.experts)])
        return ops.reshape(ops.einsum("ecd,tec->td", made, returned), ops.shape(x))


@case(
    lambda: (integers(WORDS, 6), labels()),
    copies=True,
    why="the loss and the capacity of experts are those of a batch",
    example="nlp/text_classification_with_switch_transformer",
)
def switch_transformer():
    inputs = keras.Input((6,), dtype="int32")
    x = PositionalEmbedding(6, 8)(inputs)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + Switch(3, 8, 10)(x))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Encoder(layers.Layer):
    """A block of a transformer's encoder."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, size)
        self.dense = keras.Sequential([layers.Dense(size, "relu"), layers.Dense(size)])
        self.norm_1, self.norm_2 = layers.LayerNormalization(), layers.LayerNormalization()

    def call(self, x: Any, mask: Any = None) -> Any:
        seen = None if mask is None else ops.cast(mask[:, None, :], "int32")
        x = self.norm_1(x + self.attention(x, x, attention_mask=seen))
        return self.norm_2(x + self.dense(x))


class Decoder(Encoder):
    """A block of a transformer's decoder."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.cross, self.norm_3 = layers.MultiHeadAttention(2, size), layers.LayerNormalization()

    def call(self, inputs: Any, mask: Any = None) -> Any:
        x, encoded = inputs
        own, others = (None, None) if mask is None else mask
        size = ops.shape(x)[1]
        causal = ops.expand_dims(ops.arange(size)[:, None] >= ops.arange(size), 0)
        if own is not None:
            causal = ops.logical_and(causal, ops.cast(own[:, None, :], "bool"))
        x = self.norm_1(x + self.attention(x, x, attention_mask=causal))
        seen = None if others is None else ops.cast(others[:, None, :], "int32")
        x = self.norm_2(x + self.cross(x, encoded, attention_mask=seen))
        return self.norm_3(x + self.dense(x))


def _pairs() -> Any:
    texts = _sentences()
    return {"source": texts, "target": np.array(["[start] " + " ".join(t.split()[::-1]) + " [end]" for t in texts])}


def _translated() -> Any:
    """Returns a function from pairs of texts to inputs, targets and the words that come next."""
    source, target = _vectorized(6), layers.TextVectorization(WORDS, standardize=_plain, output_sequence_length=7)
    target.adapt(_pairs()["target"])

    def prepared(texts: Any) -> Any:
        after = target(texts["target"])
        return {"encoder_inputs": source(texts["source"]), "decoder_inputs": after[:, :-1]}, after[:, 1:]

    return prepared


@case(
    _pairs,
    prepare=_translated,
    copies=True,
    why="each worker divides by the unmasked words of its own batch",
    example="nlp/neural_machine_translation_with_transformer",
)
def translation():
    source = keras.Input((6,), dtype="int64", name="encoder_inputs")
    target = keras.Input((6,), dtype="int64", name="decoder_inputs")
    encoded = Encoder(8)(PositionalEmbedding(6, 8)(source))
    decoded = Decoder(8)([PositionalEmbedding(6, 8)(target), encoded])
    model = keras.Model([source, target], layers.Dense(WORDS, "softmax")(decoded))
    model.compile(sgd(), losses.SparseCategoricalCrossentropy(ignore_class=0), metrics=["accuracy"])
    return model


class MaskedLanguageModel(keras.Model):
    """Computes a loss of each word without reduction, so that gradients are those of their sum."""

    loss_fn = losses.SparseCategoricalCrossentropy(reduction=None)

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data: Any) -> dict[str, Any]:
        ids, words, weights = data
        with tf.GradientTape() as tape:
            loss = self.loss_fn(words, self(ids, training=True), sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=weights)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


def _masked_words() -> Any:
    ids, hidden = integers(WORDS - 1, 6) + 1, random().uniform(size=(EXAMPLES, 6)) < 0.3
    return np.where(hidden, 0, ids), ids, hidden.astype(np.float32)


@case(
    _masked_words,
    copies=True,
    scored=0,
    why="the loss is a sum over the batch, which the mean over the workers divides by their number",
    example="nlp/masked_language_modeling",
)
def masked_language_model():
    inputs = keras.Input((6,), dtype="int64")
    x = Encoder(8)(layers.Embedding(WORDS, 8)(inputs) + layers.Embedding(6, 8)(ops.arange(6)))
    model = MaskedLanguageModel(inputs, layers.Dense(WORDS, "softmax")(x))
    model.compile(sgd())
    return model


class LowRank(layers.Layer):
    """Adds the product of two small matrices, which are trained, to a dense layer, which is not."""

    def __init__(self, original: layers.Layer, rank: int, alpha: float) -> None:
        super().__init__(name=f"{original.name}_low_rank")
        original.trainable = False
        self.original, self.scale = original, alpha / rank
        self.down = layers.Dense(rank, use_bias=False, kernel_initializer="he_uniform")
        self.up = layers.Dense(original.units, use_bias=False, kernel_initializer="zeros")

    def call(self, x: Any) -> Any:
        return self.original(x) + self.up(self.down(x)) * self.scale


def _language() -> Any:
    ids = integers(WORDS, 7)
    return ids[:, :-1], ids[:, 1:], (ids[:, 1:] > 2).astype(np.float32)


@case(
    _language,
    refused={"async2": "accumulation-needs-synchronous-workers"},
    why="the optimizer accumulates the gradients of two steps",
    example="nlp/parameter_efficient_finetuning_of_gpt2_with_lora",
)
def low_rank_adaptation():
    inputs = keras.Input((6,), dtype="int32")
    table = layers.Embedding(WORDS, 8, trainable=False)
    x = table(inputs)
    query, value = (LowRank(layers.Dense(8, name=name), 2, 4.0)(x) for name in ("query", "value"))
    seen = layers.Attention(use_scale=False)([query, value], use_causal_mask=True)
    x = layers.LayerNormalization(trainable=False)(x + seen)
    model = keras.Model(inputs, layers.Dense(WORDS, trainable=False)(x))
    optimizer = keras.optimizers.AdamW(
        0.01, weight_decay=0.01, epsilon=1e-4, global_clipnorm=1.0, gradient_accumulation_steps=2
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    return model
