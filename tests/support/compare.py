"""Trains the same model twice, with Keras's own `fit` and with tfdist in one process, and compares the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist

FEATURES, CLASSES, EXAMPLES, BATCH = 5, 3, 44, 8
"""The last batch of each epoch has 4 examples."""


def classes(examples: int = EXAMPLES, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns points around one center per class, and the classes."""
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, examples)
    centres = np.random.default_rng(99).normal(size=(CLASSES, FEATURES))
    return (centres[y] + random.normal(size=(examples, FEATURES))).astype(np.float32), y


def batches(*arrays: Any, batch: int = BATCH) -> tf.data.Dataset:
    """Returns the arrays as a dataset of batches, in their order."""
    return tf.data.Dataset.from_tensor_slices(arrays or classes()).batch(batch)


def classifier(*layers: keras.layers.Layer, optimizer: Any = "adam", **compiled: Any) -> keras.Model:
    """Returns a compiled classifier for `classes()`."""
    hidden = layers or (keras.layers.Dense(4, activation="relu"),)
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **({"metrics": ["accuracy"]} | compiled))
    return model


def train_both(
    build: Callable[[], keras.Model], data: Any = None, *, epochs: int = 2, validation: Any = None, **given: Any
) -> tuple[keras.Model, keras.Model]:
    """Trains a model with `keras.Model.fit` and with `tfdist.fit`, from the same seed on the same data."""
    data = batches() if data is None else data
    keras.utils.set_random_seed(7)
    plain = build()
    plain.fit(data, epochs=epochs, verbose=0, shuffle=False, validation_data=validation)
    keras.utils.set_random_seed(7)
    ours = build()
    tfdist.fit(ours, data, epochs=epochs, validation_data=validation, **({"steps_per_execution": 2} | given))
    return plain, ours


def assert_same(plain: keras.Model, ours: keras.Model, tolerance: float = 1e-6) -> None:
    """Asserts that weights, optimizer variables and history are equal."""
    assert _differing(plain.variables, ours.variables, tolerance) == {}, (plain.history.history, ours.history.history)
    assert _differing(plain.optimizer.variables, ours.optimizer.variables, tolerance) == {}
    assert list(plain.history.history) == list(ours.history.history)
    assert plain.history.epoch == ours.history.epoch
    for name, values in plain.history.history.items():
        np.testing.assert_allclose(ours.history.history[name], values, rtol=2e-6, atol=1e-6, err_msg=name)


def _differing(some: list[keras.Variable], others: list[keras.Variable], tolerance: float) -> dict[str, float]:
    """Returns by how much two lists of variables differ where it is more than the tolerance."""
    found = {
        f"{number} {one.path}": difference([one], [other])
        for number, (one, other) in enumerate(zip(some, others, strict=True))
    }
    return {name: value for name, value in found.items() if not value <= tolerance}


def difference(some: list[keras.Variable], others: list[keras.Variable]) -> float:
    """Returns the largest difference between two lists of variables."""
    assert [variable.shape for variable in some] == [variable.shape for variable in others]
    pairs = zip(some, others, strict=True)
    return max(
        (float(np.max(np.abs(np.float64(a.numpy()) - np.float64(b.numpy())), initial=0)) for a, b in pairs), default=0.0
    )
