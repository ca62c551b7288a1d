"""The initial value of a sharded variable, computed block by block and equal to that of the whole variable.

Keras's initializers draw from TensorFlow's stateless generator, Philox (Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, 2011). It maps each value of a counter to four 32-bit words, which make one group of values. So a block is
drawn by setting the counter to that of its first group, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.tf_compat.variables import random_functions, seed_tensor, wrap_initialization
from tfdist_cli.train.variables.sharding import Block

_WORDS = 4
"""The number of 32-bit words per value of the counter."""
_RESERVED = 256
"""The words that TensorFlow reserves per value of a truncated normal, which is redrawn until it is within bounds."""
_CONSTANT = {keras.initializers.Zeros.__call__, keras.initializers.Ones.__call__}
_RANDOM = {
    keras.initializers.RandomNormal.__call__,
    keras.initializers.RandomUniform.__call__,
    keras.initializers.TruncatedNormal.__call__,
    keras.initializers.VarianceScaling.__call__,
}


@dataclass(frozen=True)
class InitialValue:
    """The initial value of a Keras variable.

    Args:
        initializer: a Keras initializer, or any function of `(shape, dtype)`.
        shape: the shape of the whole variable.
        dtype: the type of the variable.
    """

    initializer: Any
    shape: tuple[int, ...]
    dtype: str

    def rows(self) -> Callable[[Block], Any]:
        """Returns a function that computes the rows of a block on the current device.

        Constant initializers and those that draw each value independently compute the block alone. All others, such as
        initializers in user code, compute the whole value once, and blocks are slices of it.
        """
        call = type(self.initializer).__call__
        if call in _CONSTANT or (call is keras.initializers.Constant.__call__ and np.ndim(self.initializer.value) == 0):
            return lambda block: self.initializer((block.count, *self.shape[1:]), dtype=self.dtype)
        if call not in _RANDOM:
            whole = tf.convert_to_tensor(self.initializer(self.shape, dtype=self.dtype))
            return lambda block: whole[block.first : block.first + block.count]
        random, width = self._random_values(), int(np.prod(self.shape[1:]))

        def rows(block: Block) -> tf.Tensor:
            return tf.reshape(random.values(block.first * width, block.count * width), (block.count, *self.shape[1:]))

        return rows

    @property
    def bytes(self) -> int:
        """The size of the whole variable."""
        return int(tf.as_dtype(self.dtype).size * np.prod(self.shape, dtype=np.int64))

    @property
    def row_unit(self) -> int:
        """How many rows are never divided between two shards: the initializer's `row_unit`, or 1."""
        return getattr(self.initializer, "row_unit", 1)

    @property
    def is_zeros(self) -> bool:
        """Whether all values are 0."""
        return type(self.initializer).__call__ is keras.initializers.Zeros.__call__

    def _random_values(self) -> _RandomValues:
        """Calls the initializer with random functions that return a description of their values."""
        with random_functions(_RandomFunctions):
            return self.initializer(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class _RandomValues:
    """Random values to be drawn: the result of an operation, times a scale, plus a shift.

    Args:
        op: TensorFlow's operation for the standard distribution.
        scale: a tensor, shape ().
        shift: a tensor, shape ().
        seed: two integers.
        reserved: whether each value has `_RESERVED` words. Otherwise, all words of a counter value are used.
    """

    op: Callable[..., tf.Tensor]
    scale: tf.Tensor
    shift: tf.Tensor
    seed: tf.Tensor
    reserved: bool = False

    def values(self, first: int, count: int) -> tf.Tensor:
        """Draws `count` values from index `first` on."""
        dtype = self.scale.dtype
        group = 2 if dtype == tf.float64 else 4
        groups, skipped = divmod(first, group)  # draws start with a whole group
        key, counter = self._start
        drawn = self.op(
            shape=[skipped + count],
            key=key,
            counter=_advance(counter, groups * (group * _RESERVED // _WORDS if self.reserved else 1)),
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=dtype,
        )
        return drawn[skipped:] * self.scale + self.shift

    @functools.cached_property
    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=self.seed)
        return key.numpy(), counter.numpy()


class _RandomFunctions:
    """Replaces the functions by which Keras's initializers draw, under the same names."""

    @staticmethod
    def uniform(shape: Any, minval: Any, maxval: Any, dtype: Any, seed: Any) -> _RandomValues:  # noqa: ARG004 Keras's own
        low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
        return _RandomValues(tf.raw_ops.StatelessRandomUniformV2, high - low, low, seed_tensor(seed))

    @staticmethod
    def normal(shape: Any, mean: Any, stddev: Any, dtype: Any, seed: Any) -> _RandomValues:  # noqa: ARG004 Keras's own
        scale, shift = tf.convert_to_tensor(stddev, dtype), tf.convert_to_tensor(mean, dtype)
        return _RandomValues(tf.raw_ops.StatelessRandomNormalV2, scale, shift, seed_tensor(seed))

    @staticmethod
    def truncated_normal(shape: Any, mean: Any, stddev: Any, dtype: Any, seed: Any) -> _RandomValues:
        plain = _RandomFunctions.normal(shape, mean, stddev, dtype, seed)
        return replace(plain, op=tf.raw_ops.StatelessTruncatedNormalV2, reserved=True)


def _advance(counter: np.ndarray, by: int) -> np.ndarray:
    """Advances a 128-bit counter, given as two 64-bit words, the lower one first."""
    low, high = (int(word) for word in counter)
    advanced = low + (high << 64) + by
    return np.array([advanced & (2**64 - 1), (advanced >> 64) & (2**64 - 1)], np.uint64)


_current: ContextVar[InitialValue | None] = ContextVar("tfdist_initial_value", default=None)


def current_initial_value() -> InitialValue | None:
    """Returns the initial value of the Keras variable whose storage is being created."""
    return _current.get()


@functools.cache
def record_initial_values() -> None:
    """Patches Keras, for the whole process, so that `current_initial_value` knows the initializer.

    Keras passes only a value to TensorFlow when it creates the storage.
    """

    @contextmanager
    def recorded(initializer: Any, shape: tuple[int, ...], dtype: str) -> Iterator[None]:
        token = _current.set(InitialValue(initializer, shape, dtype))
        try:
            yield
        finally:
            _current.reset(token)

    wrap_initialization(recorded)
