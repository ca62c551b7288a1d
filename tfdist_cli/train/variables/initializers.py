"""The initial value of a spread variable, block by block: the very numbers that its initializer gives for the whole.

Keras's initializers draw with TensorFlow's stateless generator, Philox (Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, 2011). It turns a counter into four 32-bit words, for one group of values, and counts on. So the values
from any group on are drawn by starting with its own counter, and on a ps as anywhere else.
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
"""32-bit words that Philox makes of one counter."""
_RESERVED = 256
"""Words that TensorFlow keeps for each value of a truncated normal, which is drawn until it is within bounds."""
_EVEN = {keras.initializers.Zeros.__call__, keras.initializers.Ones.__call__}
_DRAWN = {
    keras.initializers.RandomNormal.__call__,
    keras.initializers.RandomUniform.__call__,
    keras.initializers.TruncatedNormal.__call__,
    keras.initializers.VarianceScaling.__call__,
}


@dataclass(frozen=True)
class Initial:
    """What a Keras variable is initialized with.

    Args:
        initializer: Keras's, or any function of `(shape, dtype)`.
        shape: the whole variable's.
        dtype: its type.
    """

    initializer: Any
    shape: tuple[int, ...]
    dtype: str

    def rows(self) -> Callable[[Block], Any]:
        """A function that makes the rows of a block, on the device that it is called on.

        Initializers that don't fill or draw value by value, the user's own among them, make the whole, which is cut.
        """
        call = type(self.initializer).__call__
        if call in _EVEN or (call is keras.initializers.Constant.__call__ and np.ndim(self.initializer.value) == 0):
            return lambda block: self.initializer((block.count, *self.shape[1:]), dtype=self.dtype)
        if call not in _DRAWN:
            whole = tf.convert_to_tensor(self.initializer(self.shape, dtype=self.dtype))
            return lambda block: whole[block.first : block.first + block.count]
        draw, width = self._draw(), int(np.prod(self.shape[1:]))

        def drawn(block: Block) -> tf.Tensor:
            return tf.reshape(draw.values(block.first * width, block.count * width), (block.count, *self.shape[1:]))

        return drawn

    @property
    def bytes(self) -> int:
        """What the variable takes."""
        return int(tf.as_dtype(self.dtype).size * np.prod(self.shape, dtype=np.int64))

    @property
    def is_zeros(self) -> bool:
        """Whether memory that is all zeros needs nothing more."""
        return type(self.initializer).__call__ is keras.initializers.Zeros.__call__

    def _draw(self) -> _Draw:
        """What the initializer would draw, found by calling it with something else in the place of what draws."""
        with random_functions(_Draws):
            return self.initializer(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class _Draw:
    """Values to be drawn: what TensorFlow's operation gives, times a scale, plus a shift.

    Args:
        op: TensorFlow's operation for the plain distribution.
        scale: a tensor, shape ().
        shift: a tensor, shape ().
        seed: two integers.
        reserved: whether each value has `_RESERVED` words of its own; else as many values as can share a counter.
    """

    op: Callable[..., tf.Tensor]
    scale: tf.Tensor
    shift: tf.Tensor
    seed: tf.Tensor
    reserved: bool = False

    def values(self, first: int, count: int) -> tf.Tensor:
        """`count` of them, from number `first` on."""
        dtype = self.scale.dtype
        group = 2 if dtype == tf.float64 else 4
        groups, skipped = divmod(first, group)  # drawing begins with a whole group
        key, counter = self._start
        drawn = self.op(
            shape=[skipped + count],
            key=key,
            counter=_advanced(counter, groups * (group * _RESERVED // _WORDS if self.reserved else 1)),
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=dtype,
        )
        return drawn[skipped:] * self.scale + self.shift

    @functools.cached_property
    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=self.seed)
        return key.numpy(), counter.numpy()


class _Draws:
    """Stands where Keras's initializers draw, under Keras's names, and says what they would draw."""

    @staticmethod
    def uniform(shape: Any, minval: Any, maxval: Any, dtype: Any, seed: Any) -> _Draw:  # noqa: ARG004 Keras's own
        low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
        return _Draw(tf.raw_ops.StatelessRandomUniformV2, high - low, low, seed_tensor(seed))

    @staticmethod
    def normal(shape: Any, mean: Any, stddev: Any, dtype: Any, seed: Any) -> _Draw:  # noqa: ARG004 Keras's own
        scale, shift = tf.convert_to_tensor(stddev, dtype), tf.convert_to_tensor(mean, dtype)
        return _Draw(tf.raw_ops.StatelessRandomNormalV2, scale, shift, seed_tensor(seed))

    @staticmethod
    def truncated_normal(shape: Any, mean: Any, stddev: Any, dtype: Any, seed: Any) -> _Draw:
        plain = _Draws.normal(shape, mean, stddev, dtype, seed)
        return replace(plain, op=tf.raw_ops.StatelessTruncatedNormalV2, reserved=True)


def _advanced(counter: np.ndarray, by: int) -> np.ndarray:
    """A counter of 128 bits, as two numbers of 64, the lower ones first, moved on."""
    low, high = (int(number) for number in counter)
    moved = low + (high << 64) + by
    return np.array([moved & (2**64 - 1), (moved >> 64) & (2**64 - 1)], np.uint64)


_now: ContextVar[Initial | None] = ContextVar("tfdist_initial", default=None)


def initial_now() -> Initial | None:
    """What the Keras variable whose storage is just being made is initialized with."""
    return _now.get()


@functools.cache
def note_initializers() -> None:
    """From now on `initial_now` says it: TensorFlow, which is asked for storage, is told a value only."""

    @contextmanager
    def noted(initializer: Any, shape: tuple[int, ...], dtype: str) -> Iterator[None]:
        token = _now.set(Initial(initializer, shape, dtype))
        try:
            yield
        finally:
            _now.reset(token)

    wrap_initialization(noted)
