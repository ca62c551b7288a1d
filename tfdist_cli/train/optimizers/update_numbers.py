"""The number and the learning rate of an update, on each device that stores parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.tf_compat import keras_optimizer as compat
from tfdist_cli.train.variables.placement import created_beside


class UpdateNumbers(Protocol):
    """The learning rate, and how many updates there were before, of one update."""

    def on(self, device: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns both on a device: the learning rate in its own type, the count as int64, each of shape ()."""


class SentNumbers:
    """Numbers that each other device gets as one tensor.

    Args:
        learning_rate: the learning rate, shape ().
        iterations: the number of updates before this one, int64, shape ().
    """

    def __init__(self, learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
        self._dtype = learning_rate.dtype
        with tf.device(iterations.device):
            # float64 represents every float32 and every count below 2**53.
            self._both = tf.stack([tf.cast(learning_rate, tf.float64), tf.cast(iterations, tf.float64)])
        self._by_device = {iterations.device: (learning_rate, iterations)}

    def on(self, device: str) -> tuple[tf.Tensor, tf.Tensor]:
        """See `UpdateNumbers.on`."""
        if device not in self._by_device:
            with tf.device(device):
                learning_rate, iterations = tf.unstack(tf.identity(self._both))
                self._by_device[device] = tf.cast(learning_rate, self._dtype), tf.cast(iterations, tf.int64)
        return self._by_device[device]


class UpdateCounts:
    """Counts on each ps the updates of its own parameters.

    The optimizer's `iterations` is on one ps. If the others received the number of each update from there, none of them
    could apply a gradient before that ps has received its own. Each update of a model changes parameters on the same
    ps, so all counts are equal when no update is under way.

    Args:
        optimizer: the optimizer.
        stored: the variables that store its parameters.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, stored: Iterable[Any]) -> None:
        self._optimizer = optimizer
        self._iterations = compat.iterations(optimizer)
        beside = {variable.device: variable for variable in stored}
        beside.pop(self._iterations.value.device, None)
        self._own = {device: created_beside(variable, 0, tf.int64) for device, variable in beside.items()}

    def on(self, device: str) -> Any:
        """The variable that counts the updates on a device, int64, shape ()."""
        return self._own.get(device, self._iterations.value)

    def begin(self) -> None:
        """Sets all counts to the optimizer's. No update may be under way."""
        if self._own:
            count = int(self._iterations.numpy())
            for own in self._own.values():
                own.assign(count)
            for own in self._own.values():
                own.numpy()  # when it is read, it is assigned: an operation on another task may be done any time later

    def numbers(
        self,
        learning_rate: tf.Tensor,
        iterations: tf.Tensor,
        rate_scaling: RateScaling | None,
        awaited: Callable[[str], list[tf.Tensor]],
    ) -> UpdateNumbers:
        """Counts an update on each ps.

        Args:
            learning_rate: the learning rate on the optimizer's ps, shape ().
            iterations: the number of updates before this one there, int64, shape ().
            rate_scaling: scales the optimizer's learning rate.
            awaited: returns the tensors for which the count on a device waits.
        """
        return _CountedNumbers(self._own, self._optimizer, learning_rate, iterations, rate_scaling, awaited)


class _CountedNumbers:
    """See `UpdateCounts.numbers`."""

    def __init__(
        self,
        counts: dict[str, Any],
        optimizer: keras.optimizers.Optimizer,
        learning_rate: tf.Tensor,
        iterations: tf.Tensor,
        rate_scaling: RateScaling | None,
        awaited: Callable[[str], list[tf.Tensor]],
    ) -> None:
        self._counts, self._optimizer, self._rate_scaling = counts, optimizer, rate_scaling
        self._awaited = awaited
        self._by_device = {iterations.device: (learning_rate, iterations)}

    def on(self, device: str) -> tuple[tf.Tensor, tf.Tensor]:
        """See `UpdateNumbers.on`."""
        if device not in self._by_device:
            self._by_device[device] = counted(
                self._optimizer, self._counts[device], self._awaited(device), self._rate_scaling
            )
        return self._by_device[device]


def counted(
    optimizer: keras.optimizers.Optimizer, counter: Any, awaited: list[tf.Tensor], rate_scaling: RateScaling | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts an update, and returns its learning rate and the number of updates before it, on the counter's device.

    Args:
        optimizer: the optimizer.
        counter: the variable that counts, int64, shape ().
        awaited: tensors that are awaited before.
        rate_scaling: scales the optimizer's learning rate.
    """
    with tf.device(counter.device):
        with tf.control_dependencies(awaited):
            iterations = counter.assign_add(1, read_value=True) - 1
        own, accumulated = compat.learning_rate(optimizer), optimizer.gradient_accumulation_steps
        learning_rate = learning_rate_at(own, iterations, rate_scaling, accumulated)
        with tf.control_dependencies([iterations]):  # Keras's code may use the learning rate alone
            return tf.identity(learning_rate), iterations


def learning_rate_at(
    own: Any, iterations: tf.Tensor, rate_scaling: RateScaling | None, accumulated: int | None = None
) -> tf.Tensor:
    """Returns the learning rate of an update, read once and not once per parameter.

    Args:
        own: the optimizer's learning rate: a variable, a schedule or a function.
        iterations: the number of updates before this one, int64, shape (). With accumulation it counts every step, as
            Keras's schedules do.
        rate_scaling: scales the learning rate; None leaves it.
        accumulated: the steps whose gradients make one update, `gradient_accumulation_steps`; the warm-up counts
            updates.
    """
    if isinstance(own, keras.optimizers.schedules.LearningRateSchedule):
        learning_rate = tf.convert_to_tensor(own(iterations))
    else:
        learning_rate = tf.convert_to_tensor(own.value if isinstance(own, keras.Variable) else own())
    return learning_rate if rate_scaling is None else rate_scaling.at(learning_rate, iterations // (accumulated or 1))
