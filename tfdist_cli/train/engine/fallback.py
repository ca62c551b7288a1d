"""Falls back to the standard path of execution for models with which the fast path fails.

Engines have optimizations beyond those of TensorFlow and Keras: fused kernels, packed tensors, several steps in one
function, rows of tables, XLA, another executor. One of them may not support a model. So the first execution is an
attempt: if it fails, all tasks that train together restore the variables, and continue without any of these. If that
fails, too, the error is the model's own, and is raised unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TfdistError
from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.layers.dynamic_tables import full_table
from tfdist_cli.train.tf_compat.op_errors import comes_from_users_code, is_from_users_code, summary
from tfdist_cli.train.variables.sharding import parts, variable_bytes

log = logging.getLogger("tfdist")
_Result = TypeVar("_Result")

MAX_BYTES = 2**30
"""Larger variables are not copied for an attempt: an error is then final."""
_UNRELATED_ERRORS = (
    tf.errors.OutOfRangeError,
    tf.errors.CancelledError,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
)
"""Errors that do not depend on the path of execution: the data ends, or a task is lost."""


class VariableCopies:
    """Copies of variables before an attempt.

    Args:
        variables: the variables.
        scope: the strategy's.
    """

    def __init__(self, variables: Sequence[keras.Variable], scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self._scope, self._copies = scope, list[tuple[Any, tf.Tensor]]()
        with scope():
            for part in (part for variable in variables for part in parts(variable)):
                with tf.device(part.device):
                    self._copies.append((part, tf.identity(tf.convert_to_tensor(part))))

    @classmethod
    def fit_memory(cls, variables: Sequence[keras.Variable]) -> bool:
        """Whether the variables are small enough to be copied."""
        return sum(map(variable_bytes, variables)) <= MAX_BYTES

    def restore(self) -> None:
        """Assigns the copies to the variables."""
        with self._scope():
            for part, value in self._copies:
                part.assign(value)


def attempted(attempt: Callable[[], _Result], agree: Callable[[np.ndarray], np.ndarray]) -> _Result | Exception:
    """Calls a function that may fail because of the path of execution.

    Args:
        attempt: the function.
        agree: the sum over the tasks that train together, all of which make the same attempt.

    Returns:
        Its result; or the error if it has failed on this task, or on another one.

    Raises:
        Exception: it has failed for another reason: the user's code, the data, a lost task.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = attempt()
    except Exception as error:
        if is_of_model(error):
            raise
        failure = error
    try:
        failed = bool(agree(np.array([float(failure is not None)]))[0])
    except TfdistError:
        if failure is None:
            raise
        raise failure from None  # the other tasks cannot agree: they are still in the function that has failed here
    if not failed:
        return result
    return failure or RuntimeError("the attempt failed on another task")


def is_of_model(error: Exception) -> bool:
    """Whether an error does not depend on the path of execution."""
    if isinstance(error, (TfdistError, *_UNRELATED_ERRORS)) or full_table(error):
        return True
    return comes_from_users_code(error) if isinstance(error, tf.errors.OpError) else is_from_users_code(error)


class FirstExecution:
    """Runs executions, the first of them as an attempt.

    The attempt is a whole small run: no step of it is in flight when the variables are restored.

    Args:
        variables: all variables that an execution changes.
        scope: the strategy's.
        agree: the sum over the tasks that train together.
        standard: switches the engine to the standard path, and opens its data again.
        logs: whether this task logs the fallback.
    """

    def __init__(
        self,
        variables: Callable[[], Sequence[keras.Variable]],
        scope: Callable[[], AbstractContextManager[Any]],
        agree: Callable[[np.ndarray], np.ndarray],
        standard: Callable[[], None],
        *,
        logs: bool = True,
    ) -> None:
        self._variables, self._scope, self._agree, self._standard = variables, scope, agree, standard
        self._logs = logs
        self._done = False

    def run(
        self, executions: Callable[[int, int], Iterator[Execution]], steps: int, *, attempt: int, pause: Pause
    ) -> Iterator[Execution]:
        """Yields the executions of a run.

        Args:
            executions: runs steps on the engine's current path: the number of steps of this run before them, and their
                number.
            steps: the steps of the run.
            attempt: how many of them the attempt takes.
            pause: tells whether more steps follow the attempt.

        Raises:
            TrainingError: the table of a `DynamicEmbedding` is full.
        """
        try:
            yield from self._run(executions, steps, attempt, pause)
        except tf.errors.InvalidArgumentError as error:
            if full := full_table(error):
                raise full from error
            raise

    def _run(
        self, executions: Callable[[int, int], Iterator[Execution]], steps: int, attempt: int, pause: Pause
    ) -> Iterator[Execution]:
        taken = 0
        if not self._done and VariableCopies.fit_memory(self._variables()):
            for execution in self._attempted(lambda: list(executions(0, min(attempt, steps)))):
                taken += len(execution.losses)
                yield execution
            if taken < steps and pause.agreed():
                return
        self._done = True
        if taken < steps:
            yield from executions(taken, steps - taken)

    def _attempted(self, attempt: Callable[[], list[Execution]]) -> list[Execution]:
        copies = VariableCopies(self._variables(), self._scope)
        executed = attempted(attempt, self._agree)
        if not isinstance(executed, Exception):
            return executed
        failure = executed
        self._standard()
        copies.restore()
        executed = attempt()
        if self._logs:
            log.info("optimizations are off: they failed with this model: %s", summary(failure))
        return executed
