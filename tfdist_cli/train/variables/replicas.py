"""The variables of `MultiWorkerMirroredStrategy`: records which ones callbacks assign on the chief.

TensorFlow keeps the copies of the workers equal only if all workers run the same code. Callbacks run on the chief
alone. So the variables that they assign are recorded here, and the engine sends their values to the other workers
before the next step or evaluation.

TensorFlow sums metric variables over the workers whenever they are read or assigned. If one worker did so alone, it
would wait for the others. Here each worker has its own copy instead; engines do not use these variables for counting.
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
from tfdist_cli.train.variables.initial_values import create_as_carrier

_recorded: WeakKeyDictionary[Any, AssignedVariables] = WeakKeyDictionary()


def record_assignments(strategy: tf.distribute.MultiWorkerMirroredStrategy, workers: int) -> None:
    """Starts to record assignments, and lets each worker read and assign metric variables without the others.

    Args:
        strategy: the strategy.
        workers: the number of its workers; several begin with the chief's value of each variable.
    """
    recorded = _recorded[strategy.extended] = AssignedVariables()

    def create(creator: Any, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") is tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
        return create_as_carrier(own.create, creator, kwargs) if workers > 1 else own.create(creator, **kwargs)

    def update(variable: Any, function: Any, args: Any, kwargs: Any, group: bool) -> Any:
        recorded.record(variable, *args)  # Keras's SwapEMAWeights also assigns the arguments
        return own.update(variable, function, args, kwargs, group)

    own = replace_variable_methods(strategy, VariableMethods(create, update))


def assigned_variables(strategy: tf.distribute.Strategy) -> AssignedVariables:
    """Returns the record of a strategy's variables, which is empty if assignments are not recorded."""
    return _recorded.get(strategy.extended) or AssignedVariables()


class AssignedVariables:
    """Records which variables were assigned."""

    def __init__(self) -> None:
        self._eager: set[int] = set()
        self._functions: set[int] = set()
        """Variables assigned while a `tf.function` was traced, which may assign them again at any time."""
        self._paused = False

    def record(self, *variables: Any) -> None:
        """Records the assignment of TensorFlow variables."""
        if not self._paused:
            (self._eager if tf.executing_eagerly() else self._functions).update(map(id, variables))

    def contains(self, variable: keras.Variable) -> bool:
        """Whether a variable may have been assigned since the last `clear`."""
        key = id(stored(variable))
        return key in self._eager or key in self._functions

    def clear(self) -> None:
        """Removes all recorded variables, except those that functions assign."""
        self._eager.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, all workers assign the same values, and nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
