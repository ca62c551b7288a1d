"""The standard path of an execution, for models with which the fast one fails.

Engines have ways to be faster than TensorFlow and Keras are by themselves: fused kernels, packed tensors, several steps
in one function, rows of tables, XLA, another executor. A model may have what one of them cannot do. So the first
execution is an attempt: when it fails, all tasks that train together put back what it has changed, and go on without
any of these. When that fails, too, the failure is the model's own, and is raised as it is.
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
from tfdist_cli.train.tf_compat.op_errors import comes_from_users_code, is_from_users_code, shortened
from tfdist_cli.train.variables.sharding import parts

log = logging.getLogger("tfdist")
_Result = TypeVar("_Result")

MOST_BYTES = 2**30
"""Of larger variables no copy is made for an attempt, so that its failure is final once it has begun to update them."""
_NOT_OF_A_PATH = (
    tf.errors.OutOfRangeError,
    tf.errors.CancelledError,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
)
"""What has nothing to do with how a function is carried out: data that ends, and tasks that are lost."""


class Copies:
    """Variables as they are before an attempt.

    Args:
        variables: they.
        scope: the strategy's.
    """

    def __init__(self, variables: Sequence[keras.Variable], scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self._scope, self._kept = scope, list[tuple[Any, tf.Tensor]]()
        with scope():
            for part in (part for variable in variables for part in parts(variable)):
                with tf.device(part.device):
                    self._kept.append((part, tf.identity(tf.convert_to_tensor(part))))

    @classmethod
    def fit_memory(cls, variables: Sequence[keras.Variable]) -> bool:
        """Whether a copy of the variables is small enough to be made."""
        sizes = (int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size for variable in variables)
        return sum(sizes) <= MOST_BYTES

    def put_back(self) -> None:
        """Assigns the variables what they were."""
        with self._scope():
            for part, value in self._kept:
                part.assign(value)


def attempted(attempt: Callable[[], _Result], agree: Callable[[np.ndarray], np.ndarray]) -> _Result | Exception:
    """Tries something that may fail because of the path that is taken.

    Args:
        attempt: it.
        agree: the sum over the tasks that train together, all of which try the same.

    Returns:
        Its result; or, when it has failed on this task or on another one, why.

    Raises:
        Exception: it has failed of something else: the user's code, the data, a task that is lost.
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
        raise failure from None  # the others cannot agree: they are in the midst of what has failed here
    if not failed:
        return result
    return failure or RuntimeError("it failed on another task")


def is_of_model(error: Exception) -> bool:
    """Whether an error cannot be due to the path that is taken."""
    if isinstance(error, (TfdistError, *_NOT_OF_A_PATH)):
        return True
    return comes_from_users_code(error) if isinstance(error, tf.errors.OpError) else is_from_users_code(error)


def reason(failure: Exception) -> str:
    """A failure in a line."""
    lines = (shortened(failure).message if isinstance(failure, tf.errors.OpError) else str(failure)).strip()
    return lines.splitlines()[0] if lines else type(failure).__name__


class FirstExecution:
    """Runs executions, the first of them as an attempt.

    The attempt is a whole small run. It is over before it counts, so that nothing of it is under way when the variables
    are restored.

    Args:
        variables: all that an execution changes.
        scope: the strategy's.
        agree: the sum over the tasks that train together.
        standard: makes the engine take the standard path, with its data as it was opened.
        tells: whether this task is the one to say so.
    """

    def __init__(
        self,
        variables: Callable[[], Sequence[keras.Variable]],
        scope: Callable[[], AbstractContextManager[Any]],
        agree: Callable[[np.ndarray], np.ndarray],
        standard: Callable[[], None],
        *,
        tells: bool = True,
    ) -> None:
        self._variables, self._scope, self._agree, self._standard = variables, scope, agree, standard
        self._tells = tells
        self._done = False

    def run(
        self, executions: Callable[[int, int], Iterator[Execution]], steps: int, *, attempt: int, pause: Pause
    ) -> Iterator[Execution]:
        """Yields what an engine executes.

        Args:
            executions: runs steps on the path that the engine takes by then: how many steps of this run come before
                them, and how many they are.
            steps: how many steps there are.
            attempt: how many of them the attempt takes.
            pause: asked whether more steps follow the attempt.
        """
        taken = 0
        if not self._done and Copies.fit_memory(self._variables()):
            for execution in self._attempted(lambda: list(executions(0, min(attempt, steps)))):
                taken += len(execution.losses)
                yield execution
            if taken < steps and pause.agreed():
                return
        self._done = True
        if taken < steps:
            yield from executions(taken, steps - taken)

    def _attempted(self, attempt: Callable[[], list[Execution]]) -> list[Execution]:
        copies = Copies(self._variables(), self._scope)
        executed = attempted(attempt, self._agree)
        if not isinstance(executed, Exception):
            return executed
        failure = executed
        self._standard()
        copies.put_back()
        executed = attempt()
        if self._tells:
            log.info("optimizations are off, which failed with this model: %s", reason(failure))
        return executed
