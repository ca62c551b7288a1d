"""Values of variables that are kept in shared memory in a run, and are those of the variables before and after it.

The variables themselves get copies. A variable could not be in this memory: TensorFlow does not copy the value of a
variable that is read, or assigned to another one, as long as it believes that nobody changes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED

Held = Callable[[], AbstractContextManager[object]]


class StoredValues:
    """The values.

    Args:
        places: where they are, flat.
        held: returns a context in which nobody else changes them.
    """

    def __init__(self, places: Sequence[np.ndarray], held: Held = nullcontext) -> None:
        self._places, self._held = places, held
        self._seen: Sequence[np.ndarray | None] = [None] * len(places)
        """The values of the variables as they were written or read, which are kept: nothing takes their place."""

    def write(self, values: Sequence[np.ndarray]) -> None:
        """Writes the values of the variables that were assigned since the last call, or since `read`.

        A tensor that a variable has already, and is assigned to it again, counts as assigned only after a `read`.

        Args:
            values: of all variables.
        """
        assigned = [
            (place, value.reshape(-1))
            for place, value, seen in zip(self._places, values, self._seen, strict=True)
            if seen is None or not is_at(value, seen)
        ]
        if assigned:
            with self._held():
                for place, value in assigned:
                    np.copyto(place, value)
        self._seen = list(values)

    def read(self, values: Sequence[np.ndarray], then: Callable[[], None] = lambda: None) -> Sequence[np.ndarray]:
        """Copies all values for the variables: who has read a variable keeps what was read.

        Args:
            values: see `write`; those that were assigned stay.
            then: called while nobody else changes the values.

        Returns:
            The copies, flat.
        """
        self.write(values)
        copies = [aligned_bytes(place.nbytes).view(place.dtype) for place in self._places]
        with self._held():
            for copy, place in zip(copies, self._places, strict=True):
                np.copyto(copy, place)
            then()
        self._seen = copies
        return copies


def is_at(value: np.ndarray, place: np.ndarray) -> bool:
    """Whether a value is where another one is. One without numbers is anywhere."""
    return not value.size or value.ctypes.data == place.ctypes.data


def aligned_bytes(size: int) -> np.ndarray:
    """Returns bytes that TensorFlow uses where they are."""
    found = np.empty(size + ALIGNED, np.uint8)
    begin = -found.ctypes.data % ALIGNED
    return found[begin : begin + size]


def values_of(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Reads variables without a copy, as functions of shared memory find their values in their places.

    A variable whose rows were updated would be copied at each read.
    """
    for each in variables:
        tf.raw_ops.DisableCopyOnRead(resource=each.handle)
    return [flat(each.read_value()) for each in variables]


def flat(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor as a function finds it in its place: one of shape () would be a number without a place."""
    return tf.reshape(value, [-1])


_opened: list[tuple[weakref.ref[Any], Callable[[], None]]] = []
"""What uses memory of the ps, each with a function that frees it."""


def close_with(user: object, close: Callable[[], None]) -> None:
    """Lets ps free memory when nothing refers to its user any more, since its model is gone.

    Args:
        user: what uses the memory.
        close: frees it; it must not refer to the user.
    """
    _opened.append((weakref.ref(user), close))


def close_unused() -> None:
    """Frees such memory.

    It is called now and then by the thread that uses TensorFlow: a finalizer may run in any thread at any time.
    """
    for entry in list(_opened):
        used, close = entry
        if used() is None:
            _opened.remove(entry)
            close()
