"""The initial rows of a table, each computed from its id alone.

The row of an id is the row with this number that Keras's initializer would draw for an `Embedding` with enough rows,
whatever the order in which ids appear, and on any ps. Keras draws from Philox (Salmon et al., Parallel Random Numbers:
As Easy as 1, 2, 3, 2011), a function of a counter, which is computed here for the counters of the rows.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import UsageError
from tfdist_cli.train.tf_compat.variables import seed_tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_SMALLEST = 1e-7
"""The smallest uniform value of which TensorFlow takes the logarithm."""


class InitialRows:
    """Computes the initial rows of ids.

    Args:
        initializer: a Keras initializer.
        width: the number of columns.

    Raises:
        UsageError: the initializer draws from another distribution.
    """

    def __init__(self, initializer: Any, width: int) -> None:
        self._width = width
        self._constant, self._normal = 0.0, False
        self._scale, self._shift, self._seed = 0.0, 0.0, None
        kind = type(initializer)
        if kind is keras.initializers.RandomUniform:
            self._scale, self._shift = initializer.maxval - initializer.minval, initializer.minval
            self._seed = initializer.seed
        elif kind is keras.initializers.RandomNormal:
            self._scale, self._shift, self._normal = initializer.stddev, initializer.mean, True
            self._seed = initializer.seed
        elif kind is keras.initializers.Constant:
            self._constant = float(initializer.value)
        elif kind in {keras.initializers.Zeros, keras.initializers.Ones}:
            self._constant = float(kind is keras.initializers.Ones)
        else:
            raise UsageError(
                f"the rows of a DynamicEmbedding cannot be drawn by {kind.__name__}",
                code="dynamic-embedding-initializer",
                hint="use RandomUniform, RandomNormal, Zeros, Ones or Constant",
            )
        if self._seed is not None:
            with tf.init_scope():
                key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed_tensor(self._seed))
                self._key, self._counter = int(key.numpy()[0]), [int(each) for each in counter.numpy()]

    def __call__(self, ids: tf.Tensor, dtype: Any) -> tf.Tensor:
        """Returns the rows of ids, int64, shape (n,)."""
        if self._seed is None:
            return tf.fill(tf.stack([tf.size(ids), self._width]), tf.cast(self._constant, dtype))
        numbers = tf.bitcast(ids, tf.uint64)
        width = self._width
        if width % 4 == 0:
            groups = numbers[:, None] * _uint64(width // 4) + _uint64(list(range(width // 4)))
            words = tf.reshape(self._words(tf.reshape(groups, [-1])), [-1, width])
            values = self._values(words, tf.reshape(words, [-1, 2]))
        else:
            elements = tf.reshape(numbers[:, None] * _uint64(width) + _uint64(list(range(width))), [-1])
            words = self._words(tf.bitwise.right_shift(elements, _uint64(2)))
            own = tf.cast(elements & _uint64(3), tf.int32)
            values = tf.gather(self._values(words, tf.reshape(words, [-1, 2])), own, batch_dims=1)
        values = tf.reshape(values, [-1, width])
        return tf.cast(values * tf.constant(self._scale, tf.float32) + tf.constant(self._shift, tf.float32), dtype)

    def _words(self, groups: tf.Tensor) -> tf.Tensor:
        """Returns the four words of each counter, uint64 below 2^32, shape (n, 4)."""
        low, above = groups + _uint64(self._counter[0]), tf.fill(tf.shape(groups), _uint64(self._counter[1]))
        words = [low & _uint64(_LOW), _high(low), above & _uint64(_LOW), _high(above)]
        keys = [self._key & _LOW, self._key >> 32]
        for _ in range(_ROUNDS):
            first, second = (words[at] * _uint64(by) for at, by in zip((0, 2), _MULTIPLIERS, strict=True))
            words = [
                _high(second) ^ words[1] ^ _uint64(keys[0]),
                second & _uint64(_LOW),
                _high(first) ^ words[3] ^ _uint64(keys[1]),
                first & _uint64(_LOW),
            ]
            keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
        return tf.stack(words, axis=1)

    def _values(self, words: tf.Tensor, pairs: tf.Tensor) -> tf.Tensor:
        if not self._normal:
            return _uniform(words)
        # The Box-Muller transform, as TensorFlow computes it.
        radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(_uniform(pairs[:, 0]), _SMALLEST)))
        angle = _uniform(pairs[:, 1]) * (2.0 * math.pi)
        return tf.reshape(tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1), tf.shape(words))


def _uint64(value: int | list[int]) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _high(words: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(words, _uint64(32))


def _uniform(words: tf.Tensor) -> tf.Tensor:
    """Returns 32-bit words as numbers in [0, 1), by their lower 23 bits."""
    bits = tf.cast((words & _uint64(0x7FFFFF)) | _uint64(127 << 23), tf.uint32)
    return tf.bitcast(bits, tf.float32) - 1.0
