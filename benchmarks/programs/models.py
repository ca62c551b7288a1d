"""The models, of the layers of Keras 3 or of tf_keras: both have the same names."""

from collections.abc import Callable
from typing import Any

from benchmarks.sizes import CLASSES, DROPOUT, FEATURES, HEADS, IDS, LENGTH, NUMBERS, WORDS, Size


def compiled(keras: Any, size: Size, *, seed: int, **settings: Any) -> Any:
    """Returns a compiled model.

    Args:
        keras: Keras 3 or tf_keras.
        size: the model.
        seed: of its first weights, and of dropout.
        settings: further arguments of `compile`.
    """
    keras.utils.set_random_seed(seed)
    model = MODELS[size.kind](keras, size)
    if size.kind in ("two_tower", "wide_deep"):
        # Most rows of a table get few gradients: the default's initial accumulator would hide them.
        optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-4)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        metric = keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")
    else:
        rates = {"transformer": 3e-3}
        adam = keras.optimizers.Adam(rates.get(size.kind, 1e-3))
        optimizer = keras.optimizers.Adagrad(0.5) if size.kind == "table" else adam
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metric = "accuracy"
    model.compile(optimizer=optimizer, loss=loss, metrics=[metric], **settings)
    return model


def _mlp(keras: Any, size: Size) -> Any:
    hidden = [keras.layers.Dense(units, activation="relu") for units in size.widths]
    return keras.Sequential([keras.Input([FEATURES]), *hidden, keras.layers.Dense(CLASSES)])


def _cnn(keras: Any, _: Size) -> Any:
    side = round(FEATURES**0.5)
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            keras.layers.Reshape([side, side, 1]),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def _transformer(keras: Any, size: Size) -> Any:
    class Positions(keras.layers.Layer):
        """Adds a vector for each position."""

        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=tuple(shape[1:]), initializer="normal", name="positions")
            super().build(shape)

        def call(self, x: Any) -> Any:
            return x + self.table

    words = keras.Input([LENGTH], dtype="int32")
    x = Positions()(keras.layers.Embedding(WORDS, size.widths[0], embeddings_initializer="normal")(words))
    for width in size.widths:
        attention = keras.layers.MultiHeadAttention(HEADS, width // HEADS, dropout=DROPOUT)
        seen = attention(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(DROPOUT)(seen))
        hidden = keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="relu")(x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(DROPOUT)(hidden))
    return keras.Model(words, keras.layers.Dense(WORDS)(x))


def _two_tower(keras: Any, size: Size) -> Any:
    inputs = {name: keras.Input([1], dtype="int32", name=name) for name in ("user", "item")}
    towers = []
    for rows, given in zip(size.rows, inputs.values(), strict=True):
        x = keras.layers.Flatten()(keras.layers.Embedding(rows, size.width)(given))
        *hidden, last = size.widths
        for units in hidden:
            x = keras.layers.Dense(units, activation="relu")(x)
        towers.append(keras.layers.Dense(last)(x))
    return keras.Model(inputs, keras.layers.Dot(1)(towers))


def _wide_deep(keras: Any, size: Size) -> Any:
    numbers = keras.Input([NUMBERS], name="numbers")
    ids = keras.Input([len(size.rows)], dtype="int32", name="ids")
    vectors = [
        keras.layers.Flatten()(keras.layers.Embedding(rows, size.width)(ids[:, n : n + 1]))
        for n, rows in enumerate(size.rows)
    ]
    wide = keras.layers.Concatenate()([*vectors, numbers])
    deep = wide
    for units in size.widths:
        deep = keras.layers.Dense(units, activation="relu")(deep)
    logit = keras.layers.Dense(1)(keras.layers.Concatenate()([wide, deep]))
    return keras.Model({"numbers": numbers, "ids": ids}, logit)


def _table(keras: Any, size: Size) -> Any:
    ids = keras.Input([IDS], dtype="int32")
    if size.pooled:
        return keras.Model(ids, keras.layers.Dense(CLASSES)(_pooled(keras, size, ids)))
    each = IDS // len(size.rows)
    found = [_layer(keras, size, rows)(ids[:, n * each : (n + 1) * each]) for n, rows in enumerate(size.rows)]
    joined = keras.layers.Concatenate(axis=1)(found) if len(found) > 1 else found[0]
    return keras.Model(ids, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(joined)))


def _layer(keras: Any, size: Size, rows: int) -> Any:
    if not size.dynamic:
        return keras.layers.Embedding(rows, size.width)
    import tfdist_cli as tfdist  # noqa: PLC0415 no peer has the layer

    return tfdist.layers.DynamicEmbedding(size.width, rows, evict="lru" if size.dynamic == "lru" else None)


def _pooled(keras: Any, size: Size, ids: Any) -> Any:
    """Returns the mean of an example's rows."""
    (rows,) = size.rows
    if size.pooled == "Embedding":
        return keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(rows, size.width)(ids))
    from keras_rs import layers  # noqa: PLC0415 the other models do not need it

    table = layers.TableConfig("table", rows, size.width, initializer="uniform", combiner="mean")
    return layers.DistributedEmbedding(layers.FeatureConfig("ids", table, (None, IDS), (None, size.width)))(ids)


MODELS: dict[str, Callable[[Any, Size], Any]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "transformer": _transformer,
    "two_tower": _two_tower,
    "wide_deep": _wide_deep,
    "table": _table,
}
