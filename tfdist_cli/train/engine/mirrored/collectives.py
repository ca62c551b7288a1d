"""Sums over all replicas: of a step's tensors within a function, and of values between the tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.all_reduce.between_tasks import summing
from tfdist_cli.train.cluster.all_reduce.packing import packed, unpacked
from tfdist_cli.train.cluster.all_reduce.sums import AllReduce
from tfdist_cli.train.tf_compat.control_flow import after


@dataclass(frozen=True)
class Membership:
    """The tasks that train together, and the one that this process is.

    Args:
        tasks: their names in the order of their replicas, `("chief:0", "worker:0")`.
        index: this process's index among them; 0 is the chief.
        all_reduce: sums over them; None if TensorFlow's collectives do.
    """

    tasks: tuple[str, ...] = ("chief:0",)
    index: int = 0
    all_reduce: AllReduce | None = None


class Collectives:
    """The sums over the replicas of a strategy.

    Args:
        strategy: the strategy.
        membership: the tasks that train together.

    Attributes:
        replicas: the number of all replicas.
        local: the number of those of this task.
        first: the index of the first of them.
        index: the index of this task.
        workers: the number of tasks.
        on_gpus: whether the replicas' tensors are on GPUs, where TensorFlow sums them.
        sum: sums a tensor over the tasks, outside of a step.
    """

    def __init__(self, strategy: tf.distribute.Strategy, membership: Membership) -> None:
        self._all_reduce = membership.all_reduce
        self.replicas: int = strategy.num_replicas_in_sync
        self.index, self.workers = membership.index, len(membership.tasks)
        self.local = self.replicas // self.workers
        self.first = membership.index * self.local
        self.on_gpus = self.replicas > 1 and "GPU" in strategy.extended.worker_devices[0]
        self.sum = summing(strategy, self.workers, self._all_reduce)

    @property
    def gather(self) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]] | None:
        """Gathers numbers and rows of all tasks, each of one replica; None if this is not possible."""
        return self._all_reduce.gather if self._all_reduce is not None and self.local == 1 else None

    @property
    def local_all_reduce(self) -> AllReduce | None:
        """What sums over the tasks, if all of them share memory, and each has one replica on its processors."""
        alone = self.local == 1 < self.workers and not self.on_gpus
        return self._all_reduce if alone and self._all_reduce and self._all_reduce.shares_memory else None

    @property
    def can_rehearse(self) -> bool:
        """Whether this task alone can run a function once more, with other values.

        Several replicas have to run at the same time, and TensorFlow's collectives await all tasks.
        """
        return self.local == 1 and (self._all_reduce is not None or self.workers == 1)

    def failures_named(self) -> AbstractContextManager[None]:
        """Raises a failed all-reduce as an error that names the task."""
        return self._all_reduce.errors_translated() if self._all_reduce else nullcontext()

    def total(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of values over the tasks, float64."""
        if self.workers == 1:
            return values
        return np.asarray(self.sum(tf.constant(values, tf.float64)))

    def all_reduce(self, value: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the sum of a tensor over all replicas, within a step.

        Args:
            value: the replica's tensor.
            context: the replica's context.
        """
        if self.replicas == 1:
            return value
        if self._all_reduce:
            return self._all_reduce.sum(value)
        dtype = value.dtype
        if self.on_gpus and dtype == tf.bfloat16:
            value = tf.cast(value, tf.float32)  # NCCL supports bfloat16, but TensorFlow's use of it does not
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, value), dtype)

    def all_reduce_together(self, values: Sequence[tf.Tensor], context: Any) -> list[tf.Tensor]:
        """Returns the sums of tensors over all replicas, within a step. They cross together.

        Args:
            values: the replica's tensors, of static shapes and of the same type.
            context: the replica's context.
        """
        if self._all_reduce and self.replicas > 1:
            return self._all_reduce.sums(values)
        return unpacked(self.all_reduce(packed(values), context), values)

    def assign_means(
        self, variables: Sequence[keras.Variable], own: Sequence[tf.Tensor], context: Any, before: list[Any]
    ) -> list[tf.Tensor]:
        """Assigns the mean over all replicas to the replica's own copies of variables.

        Args:
            variables: the variables.
            own: the replica's values.
            context: the replica's context.
            before: awaited before.

        Returns:
            The means.
        """
        carrier = tf.float64 if any(value.dtype == tf.float64 for value in own) else tf.float32
        flat = tf.concat([tf.reshape(tf.cast(value, carrier), [-1]) for value in own], axis=0)
        means = self.all_reduce(after(flat, before), context) / self.replicas
        pieces = tf.split(means, [int(np.prod(variable.shape)) for variable in variables])
        for variable, piece in zip(variables, pieces, strict=True):
            value = tf.cast(tf.reshape(piece, variable.shape), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
        return pieces
