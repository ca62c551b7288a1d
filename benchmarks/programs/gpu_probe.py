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


def model(optimizer: Any, hidden: int) -> keras.Model:
    """Returns a network that spends most of its time in matrix products."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(hidden, activation="relu") for _ in range(2)]
    network = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss, metrics=["accuracy"])
    return network


def train() -> None:
    """Trains a few steps with float32 products; the chief writes the weights."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    chief = tfdist.is_chief()
    with tfdist.scope():
        network = model(keras.optimizers.SGD(0.01, momentum=0.9), 64)
    x, y = examples(3360)  # 20 steps of 8 replicas take no example twice

    def data(shard: tfdist.Shard) -> tf.data.Dataset:
        own = tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index)
        return own.batch(given["batch"]).repeat()

    history = tfdist.fit(
        network, data, epochs=2, steps_per_epoch=10, wire=given["wire"], updates=tfdist.Updates(**given["updates"])
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
    """Measures examples per second of all replicas together: the median of the epochs after the first."""
    laps, batch, steps = Laps(), given["batch"], given["steps"]
    x, y = examples(8 * batch)
    optimizer = "adam"

    def batches(_: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).cache().repeat().prefetch(2)

    if given["by"] == "keras":
        network = model(optimizer, given["hidden"])
        network.fit(batches(), epochs=4, steps_per_epoch=steps, callbacks=[laps], verbose=0)
        chief = True
    else:
        chief = tfdist.is_chief()
        with tfdist.scope():
            network = model(optimizer, given["hidden"])
        updates = tfdist.Updates(**given["updates"])
        tfdist.fit(network, batches, epochs=4, steps_per_epoch=steps, share="copy", callbacks=[laps], updates=updates)
    if chief:
        seconds = [after - before for before, after in zip(laps.moments, laps.moments[1:], strict=False)]
        per_step = given["batches_per_step"] * batch
        tell("rate", {"examples_per_second": per_step * steps / statistics.median(seconds), "devices": _devices()})


{"devices": devices, "train": train, "memory": memory, "grow": grow, "rate": rate}[given["do"]]()
