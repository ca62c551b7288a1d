"""The program of the tasks of `benchmarks.gpu`: reports its devices, trains, allocates memory, or measures its rate.

gpu_probe.py '{"do": "devices", "out": "FOLDER", ...}'. Results are JSON files in the folder.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist

given: dict[str, Any] = json.loads(sys.argv[1])
out = Path(given["out"])
FEATURES, CLASSES = 784, 10
TOKENS, VOCABULARY = 128, 8192


def tell(name: str, found: Any) -> None:
    """Writes a result, complete or not at all."""
    beside = out / f".{name}"
    beside.write_text(json.dumps(found), encoding="utf-8")
    beside.rename(out / f"{name}.json")


def devices() -> None:
    """Reports the GPUs that this task sees; the first task waits for the reports of all."""
    place = json.loads(os.environ["TF_CONFIG"])["task"]
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    found = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "gpus": [gpu.get("device_name", "") for gpu in gpus]}
    tell(f"{place['type']}-{place['index']}", found)
    while len(list(out.glob("*.json"))) < given["tasks"]:
        time.sleep(0.1)


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns points, and classes that follow from them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(count, FEATURES)).astype(np.float32)
    return x, (x @ random.normal(size=(FEATURES, CLASSES))).argmax(axis=1)


def sequences(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns sequences of tokens, and the class of each: the most frequent of the first tokens."""
    random = np.random.default_rng(0)
    x = random.integers(0, VOCABULARY, size=(count, TOKENS), dtype=np.int32)
    return x, np.array([np.bincount(row % CLASSES).argmax() for row in x])


def model(optimizer: Any, hidden: int) -> keras.Model:
    """Returns a network that spends most of its time in matrix products."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(hidden, activation="relu") for _ in range(2)]
    network = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES, dtype="float32")])
    return compiled(network, optimizer)


def convolutions(optimizer: Any, filters: int) -> keras.Model:
    """Returns three convolutions of `filters` filters and more, with pooling between them."""
    keras.utils.set_random_seed(1)
    network = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Reshape((28, 28, 1))])
    for factor in (1, 2, 4):
        network.add(keras.layers.Conv2D(factor * filters, 3, padding="same", activation="relu"))
        network.add(keras.layers.MaxPooling2D())
    network.add(keras.layers.Flatten())
    network.add(keras.layers.Dense(CLASSES, dtype="float32"))
    return compiled(network, optimizer)


def transformer(optimizer: Any, width: int) -> keras.Model:
    """Returns four blocks of attention with a residual, `width` wide."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(4):
        normal = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(8, width // 8)(normal, normal)
        normal = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(normal))
    classes = keras.layers.Dense(CLASSES, dtype="float32")(keras.layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(tokens, classes), optimizer)


def compiled(network: keras.Model, optimizer: Any) -> keras.Model:
    """Compiles a classifier."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss, metrics=["accuracy"], jit_compile=given["jit"])
    return network


MODELS = {
    "perceptron": (model, examples),
    "convolutions": (convolutions, examples),
    "transformer": (transformer, sequences),
}
"""How a model is built, and its examples, by name."""


def train() -> None:
    """Trains a few steps with float32 products; the chief writes the weights."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    chief = tfdist.is_chief()
    build, make = MODELS[given["model"]]
    with tfdist.scope():
        network = build(keras.optimizers.SGD(0.01, momentum=0.9), given["hidden"])
    x, y = make(3360)  # 20 steps of 8 replicas take no example twice

    def data(shard: tfdist.Shard) -> tf.data.Dataset:
        own = tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index)
        return own.batch(given["batch"]).repeat()

    history = tfdist.fit(
        network,
        data,
        epochs=2,
        steps_per_epoch=10,
        wire=given["wire"],
        updates=tfdist.Updates(**given["updates"]),
        jit=given["jit"],
    ).history
    if chief:
        weights = np.concatenate([weight.numpy().ravel() for weight in network.trainable_variables])
        np.save(out / "weights.npy", weights)
        tell("trained", {"loss": history["loss"], "devices": _devices()})


def _devices() -> list[str]:
    return sorted(device.name for device in tf.config.list_logical_devices("GPU"))


def memory() -> None:
    """Tries to allocate less memory of the GPU than the limit, then more; entering the scope sets the limit."""
    tfdist.is_chief()
    limit = given["limit"]
    found = {"within": _fits(limit // 2), "beyond": _fits(limit * 2)}
    tell("memory", found)


def _fits(size: int) -> bool:
    try:
        with tf.device("/device:GPU:0"):
            taken = tf.zeros([size], tf.uint8)
            return int(tf.cast(taken[-1], tf.int32).numpy()) == 0
    except tf.errors.ResourceExhaustedError:
        return False


def grow() -> None:
    """Creates a small tensor, and runs until its memory has been measured."""
    tfdist.is_chief()
    with tf.device("/device:GPU:0"):
        kept = tf.zeros([1024])
    tell("ready", {"sum": float(tf.reduce_sum(kept))})
    while not (out / "looked").exists():
        time.sleep(0.05)


class Laps(keras.callbacks.Callback):
    """Records the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 Keras's signature
        self.moments.append(time.perf_counter())


def rate() -> None:
    """Measures examples per second of all replicas together."""
    chief = tfdist.is_chief()
    measured = _rate("tfdist")
    if chief:
        tell("rate", {"examples_per_second": measured, "devices": _devices()})


def contest() -> None:
    """Measures examples per second of Keras's `fit` and of tfdist, in turns, in this process."""
    keras.config.set_dtype_policy(given["policy"])
    rates: dict[str, list[float]] = {"keras": [], "tfdist": []}
    for _ in range(given["rounds"]):
        for by, measured in rates.items():
            measured.append(_rate(by))
    tell("rates", rates)


def _rate(by: str) -> float:
    """Trains with one of both; returns examples per second: the median of the epochs after the first."""
    laps, batch, steps = Laps(), given["batch"], given["steps"]
    build, make = MODELS[given["model"]]
    x, y = make(8 * batch)

    def batches(_: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).cache().repeat().prefetch(2)

    if by == "keras":
        network = build("adam", given["hidden"])
        network.fit(batches(), epochs=4, steps_per_epoch=steps, callbacks=[laps], verbose=0)
    else:
        with tfdist.scope():
            network = build("adam", given["hidden"])
        updates = tfdist.Updates(**given["updates"])
        tfdist.fit(
            network,
            batches,
            epochs=4,
            steps_per_epoch=steps,
            share="copy",
            callbacks=[laps],
            updates=updates,
            jit=given["jit"] is True,
        )
    seconds = [after - before for before, after in zip(laps.moments, laps.moments[1:], strict=False)]
    return given["batches_per_step"] * batch * steps / statistics.median(seconds)


{"devices": devices, "train": train, "memory": memory, "grow": grow, "rate": rate, "contest": contest}[given["do"]]()
