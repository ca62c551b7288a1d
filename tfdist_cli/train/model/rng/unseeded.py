"""Random values that a step draws without a seed, such as `keras.random.normal(shape)`.

Keras draws them from a generator of the process. A step draws them from a generator of the model's own instead, which
begins in the state of the process's: its state is part of the model's, and so of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.assignments import seeded_draws_only
from tfdist_cli.train.tf_compat.keras_model import (
    UNSEEDED_FACTOR,
    UNSEEDED_MODULUS,
    global_seed_generator,
    process_wide_seeds,
)

_FIXED = -UNSEEDED_FACTOR * pow(UNSEEDED_FACTOR - 1, -1, UNSEEDED_MODULUS) % UNSEEDED_MODULUS
"""The number that a draw does not change: a draw multiplies the distance from it by the factor."""
_ORDER = UNSEEDED_MODULUS - 1
"""The modulus is a prime: so many draws change nothing."""
_ROW = 1 << 10
_POWERS = [pow(UNSEEDED_FACTOR, power, UNSEEDED_MODULUS) for power in range(_ROW)]
_POWERS_OF_ROW = [pow(UNSEEDED_FACTOR, _ROW * power, UNSEEDED_MODULUS) for power in range(_ORDER // _ROW + 1)]
_MOST_DRAWS = 10_000


class UnseededDraws:
    """The generator of draws without a seed in the steps of one model, once a step has drawn any.

    Attributes:
        generator: the generator; None before.
    """

    def __init__(self) -> None:
        self.generator: keras.random.SeedGenerator | None = None
        self._watches = self._found = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within it, operations may draw without a seed, if there is a generator."""
        if self.generator is None and not self._watches:
            with seeded_draws_only():
                yield
        else:
            with global_seed_generator(self.generator or self):
                yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks out for draws within the context, whose values are not used."""
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def next(self, **_: Any) -> tf.Tensor:
        """Stands in for a generator while draws are looked for."""
        self._found = True
        return tf.zeros([2], tf.int64)

    def create(self) -> bool:
        """Creates the generator if draws were found, and there is none. Returns whether it did."""
        if self.generator is not None or not self._found:
            return False
        with tf.init_scope():
            self.generator = keras.random.SeedGenerator(0, name="draws_without_seed")
        self.begin()
        return True

    def begin(self) -> None:
        """Sets the generator, if there is one, to the state of the process's."""
        if self.generator is not None:
            with tf.init_scope():
                self.generator.state.assign(keras.ops.convert_to_numpy(process_wide_seeds().state))


def state_after(state: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    """Returns the generator's state after some draws.

    Args:
        state: the state, shape (2,).
        draws: how many, int64, shape ().
    """
    row, place = (draws % _ORDER) // _ROW, (draws % _ORDER) % _ROW
    factor = tf.gather(tf.constant(_POWERS_OF_ROW, tf.int64), row) * tf.gather(tf.constant(_POWERS, tf.int64), place)
    distance = (tf.cast(state, tf.int64) - _FIXED) % UNSEEDED_MODULUS
    after = (factor % UNSEEDED_MODULUS * distance + _FIXED) % UNSEEDED_MODULUS
    return tf.where(draws > 0, tf.cast(after, state.dtype), state)


def draws_between(before: np.ndarray, after: np.ndarray) -> int:
    """Returns how many draws change the generator's state so."""
    draws, state = 0, before.astype(np.int64)
    while not np.array_equal(state, after):
        draws, state = draws + 1, (state + 1) * UNSEEDED_FACTOR % UNSEEDED_MODULUS
        if draws > _MOST_DRAWS:
            raise ValueError(f"no number of draws leads from {before} to {after}")
    return draws
