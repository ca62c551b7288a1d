"""Dataset functions that draw random numbers: each call draws the same ones, so that shards are parts of one order.

A function may permute its examples and then return a shard of them. It is called for each worker, in one process or in
several. The shards divide the data only if all calls draw the same permutation.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tfdist_cli.train.tf_compat.eager_context import global_seed, restarted_seeds
from tfdist_cli.train.tf_compat.keras_model import global_seed_generator

_generators = threading.RLock()
"""Held by the call that uses the global generators."""


class SameDraws:
    """A dataset function whose calls draw the same numbers from the global generators.

    These are those of `random`, `numpy.random` and `keras.random`, and TensorFlow's if `tf.random.set_seed` was called.
    The numbers follow from the seed of `tf.random.set_seed` and from the function's name. Workers that each read all
    data draw different ones. After a call, the program's own numbers go on. Calls run one after the other, unless the
    first one for a number of shards drew nothing.

    Args:
        function: maps a shard to its data.
        name: what the data is for: functions with different names draw different numbers.
    """

    def __init__(self, function: Callable[[Any], Any], name: str) -> None:
        self._function = function
        self._name = f"{name} {getattr(function, '__qualname__', '')}"
        self._draws_nothing: set[int] = set()

    def __call__(self, shard: Any) -> Any:
        """Returns the data of a shard."""
        read = vars(shard)  # a shard may record that its attributes are read, which only the function should do
        count, reader = read["count"], read["worker"] if read["count"] == 1 else 0
        if count in self._draws_nothing:
            return self._function(shard)
        with _restarted(f"{self._name} {reader}") as has_drawn:
            data = self._function(shard)
            if not has_drawn():
                self._draws_nothing.add(count)
        return data


@contextmanager
def _restarted(name: str) -> Iterator[Callable[[], bool]]:
    """Restarts the global generators for its duration; yields a function that tells whether one was used."""
    with _generators:
        seed = zlib.crc32(f"{name} {global_seed() or 0}".encode())
        with global_seed_generator(None), restarted_seeds(seed) as seeds_were_drawn:
            before = random.getstate(), np.random.get_state()
            random.seed(seed)
            np.random.seed(seed)
            begin = _states()
            try:
                yield lambda: _states() != begin or seeds_were_drawn()
            finally:
                random.setstate(before[0])
                np.random.set_state(before[1])


def _states() -> tuple[Any, ...]:
    """Returns the states of Python's and NumPy's generators, from which those of Keras are seeded."""
    numbers: Any = np.random.get_state()
    name, keys, *rest = numbers
    return random.getstate(), name, keys.tobytes(), *rest
