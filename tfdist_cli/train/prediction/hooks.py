"""The hooks of callbacks during a prediction: `on_predict_begin`, those of batches, and `on_predict_end`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.prediction.function import Leaves, joined
from tfdist_cli.train.prediction.groups import Groups
from tfdist_cli.train.prediction.mirrored import sum_of_tasks
from tfdist_cli.train.trainer.batch_callbacks import acts_on_predicted_batches
from tfdist_cli.train.trainer.config.training import Verbose
from tfdist_cli.train.trainer.sigterm import end_if_terminated
from tfdist_cli.train.variables.chiefs_values import copy_from_chief, differing


def _ended_by_sigterm(groups: Iterator[Leaves]) -> Iterator[Leaves]:
    """Yields groups; if a callback of a training predicts them, SIGTERM ends the prediction."""
    for leaves in groups:
        end_if_terminated()
        yield leaves


@dataclass(frozen=True)
class Hooks:
    """Calls the hooks of the chief's callbacks. All tasks that predict the same data use one alike.

    Args:
        context: this process in its cluster.
        model: the model.
        callbacks: the callbacks that this task was given; those of the chief are called.
        verbose: what callbacks read as `params["verbose"]`.
    """

    context: ClusterContext
    model: keras.Model
    callbacks: Sequence[keras.callbacks.Callback]
    verbose: Verbose = "auto"

    @cached_property
    def present(self) -> bool:
        """Whether the chief has callbacks."""
        return self._chiefs(bool(self.callbacks))

    @cached_property
    def each_batch(self) -> bool:
        """Whether one of them acts on batches."""
        return self._chiefs(any(map(acts_on_predicted_batches, self.callbacks)))

    def called(self, groups: Groups, predict: Callable[[], tuple[Any, Iterator[Leaves]]]) -> tuple[Any, list[Leaves]]:
        """Predicts groups and calls the hooks, those of batches for each group.

        Args:
            groups: the groups.
            predict: begins the prediction: returns the `tf.TensorSpec`s of the outputs, and each group's arrays.

        Returns:
            The specs, and the arrays of the groups that were predicted: fewer if a callback has set `stop_predicting`.
        """
        own = list(self.callbacks) if self.context.environment.is_chief else []
        call = keras.callbacks.CallbackList(own, model=self.model, verbose=self.verbose, epochs=1, steps=groups.length)
        self.model.stop_predicting = False
        call.on_predict_begin()
        self._share_variables()  # a program may have loaded its weights on one task alone
        outputs, all_found = predict()
        found = _ended_by_sigterm(all_found)
        collected = list(self._batch_by_batch(groups, outputs, found, call) if self.each_batch else found)
        call.on_predict_end()
        if self.present:
            self._share_variables()
        return outputs, collected

    def _batch_by_batch(
        self, groups: Groups, outputs: Any, found: Iterator[Leaves], call: keras.callbacks.CallbackList
    ) -> Iterator[Leaves]:
        first = 0
        while groups.length is None or first < groups.length:
            call.on_predict_batch_begin(first)
            leaves = next(found, None)
            if leaves is None:
                return
            logs = {"outputs": tf.nest.pack_sequence_as(outputs, [joined(parts) for parts in leaves])}
            call.on_predict_batch_end(first + groups.size - 1, logs)
            yield leaves
            if self._chiefs(self.model.stop_predicting):
                return
            first += groups.size

    @cached_property
    def _sum(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Sums integers over the tasks that run this program; None if it is only the chief."""
        environment = self.context.environment
        return sum_of_tasks(self.context) if environment.traits.together and len(environment.members) > 1 else None

    def _chiefs(self, own: bool) -> bool:
        """Returns the chief's answer on every task."""
        if self._sum is None:
            return own
        return bool(self._sum(tf.constant([int(own and self.context.environment.is_chief)], tf.int64))[0])

    def _share_variables(self) -> None:
        """Copies the chief's values to the other tasks' variables, if there are tasks and values differ."""
        if self._sum is None:
            return
        is_chief, scope = self.context.environment.is_chief, self.context.strategy.scope
        copy_from_chief(
            differing(self.model.variables, self._sum, is_chief=is_chief), self._sum, scope, is_chief=is_chief
        )
