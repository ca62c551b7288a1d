"""The variables of `MultiWorkerMirroredStrategy`: each worker's copies, of which callbacks may change the chief's.

TensorFlow keeps the copies equal only where all workers run the same code. Callbacks run on the chief alone, so what
they assign is noted here, and given to the others before the next step or score. TensorFlow's own metrics are summed
over the workers wherever they are read or assigned, which a worker alone would wait for; here each copy is a worker's
own, as engines count in none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from tfdist_cli.train.tf_compat.distribute import VariableMethods, replace_variable_methods
from tfdist_cli.train.tf_compat.variables import stored

_notes: WeakKeyDictionary[Any, Assigned] = WeakKeyDictionary()


def adapt(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Begins to note what is assigned; from now on a worker reads and assigns variables by itself."""
    noted = _notes[strategy.extended] = Assigned()

    def create_own(creator: Any, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") is tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
        return own.create(creator, **kwargs)

    def update_and_note(variable: Any, function: Any, args: Any, kwargs: Any, group: bool) -> Any:
        noted.note(variable, *args)  # Keras's SwapEMAWeights assigns the arguments, too
        return own.update(variable, function, args, kwargs, group)

    own = replace_variable_methods(strategy, VariableMethods(create_own, update_and_note))


def assigned(strategy: tf.distribute.Strategy) -> Assigned:
    """What is noted of a strategy's variables: nothing where they are not adapted."""
    return _notes.get(strategy.extended) or Assigned()


class Assigned:
    """Which variables have been assigned."""

    def __init__(self) -> None:
        self._now: set[int] = set()
        self._functions: set[int] = set()
        """Those that a function of the user's assigns: it may do so again at any time."""
        self._paused = False

    def note(self, *variables: Any) -> None:
        """Takes note of TensorFlow's variables."""
        if not self._paused:
            (self._now if tf.executing_eagerly() else self._functions).update(map(id, variables))

    def has(self, variable: keras.Variable) -> bool:
        """Whether it may have been assigned since the last `clear`."""
        key = id(stored(variable))
        return key in self._now or key in self._functions

    def clear(self) -> None:
        """Forgets what has been assigned."""
        self._now.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is assigned within it is the same on all workers, and is not noted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
