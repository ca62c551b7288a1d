"""The order in which each stage of a model takes the micro-batches of a step: one forward, one backward.

Without an order, a worker would begin all micro-batches at once, and none would reach the next stage before all do. So
a stage begins a micro-batch when it has done the one before. It also waits for the gradients of an earlier one: stage s
of S has at most S - s micro-batches in progress, and keeps the activations of no more (Narayanan et al., PipeDream,
2019). The idle part of the time is (S - 1) / (M + S - 1) for M micro-batches, as without the second rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Calls = list[tuple[int, list[tf.Tensor]]]
"""The calls of layers with one micro-batch, in order: the stage, and the tensors that are returned."""


class MicroBatchOrder:
    """The order of the micro-batches of one replica in one step.

    Args:
        stages: the number of stages.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._calls: list[Calls] = []
        self._gradients: list[dict[int, list[tf.Tensor]]] = []
        self._graph = tf.compat.v1.get_default_graph()
        """The graph of the step. Layers in a loop or a condition have their own, and are ordered with it as a whole."""

    def begin(self) -> None:
        """Begins the next micro-batch."""
        self._calls.append([])

    def awaited(self, stage: int) -> list[tf.Tensor]:
        """Returns what the next call of a layer, in a stage, has to wait for; nothing within a run of calls there."""
        if not self._is_in_step():
            return []
        calls = self._calls[-1]
        if calls and calls[-1][0] == stage:
            return []
        found = _last_of_run(self._calls[-2], len(calls), stage) if len(self._calls) > 1 else []
        before = len(self._calls) - 1 - (self._stages - stage)
        return found + (self._gradients[before].get(stage, []) if before >= 0 else [])

    def called(self, stage: int, outputs: Any) -> None:
        """Notes a call of a layer in a stage, and what it has returned."""
        if not self._is_in_step():
            return
        tensors = [each for each in tf.nest.flatten(outputs) if isinstance(each, tf.Tensor)]
        self._calls[-1].append((stage, tensors))

    def _is_in_step(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._graph

    def end(self, gradients: Sequence[tuple[int, tf.Tensor]]) -> None:
        """Ends a micro-batch.

        Args:
            gradients: what its gradients consist of, each with the stage that computes it.
        """
        found: dict[int, list[tf.Tensor]] = {}
        for stage, gradient in gradients:
            found.setdefault(stage, []).append(gradient)
        self._gradients.append(found)


def _last_of_run(calls: Calls, index: int, stage: int) -> list[tf.Tensor]:
    """Returns the outputs of the last call of a run of calls in a stage, which begins at an index."""
    outputs: list[tf.Tensor] = []
    for own, tensors in calls[index:]:
        if own != stage:
            break
        outputs = tensors
    return outputs
