"""Several steps of a worker in one function, whose operations run one after another.

TensorFlow's default executor passes operations to other threads. That makes nothing faster where a task has a single
thread for an operation. The single-threaded executor does without. So steps stay in a loop, and each iteration calls a
function of several of them, as long as so many are certain to be taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.threads import one_thread
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.tf_compat.functions import (
    SINGLE_THREADED,
    copied,
    function_kept_whole,
    loops_kept_whole,
    why_not_in_order,
)

MOST_TOGETHER = 5
"""Steps in one function. With a single one, the MLP 784-500-500-10 at batch 64 takes 0.9 times as many. With more, the
function takes longer to compile."""
log = logging.getLogger("tfdist")

Step = Callable[..., tuple[Sequence[Any], Sequence[tf.Tensor]]]
"""A step: what the step before has left → what it leaves, in the same structure, and what it tells of itself."""
Row = Callable[..., tuple[Sequence[Any], Sequence[Sequence[tf.Tensor]]]]
"""Several steps: the same, with what each of them tells."""


@dataclass(frozen=True)
class Unrolled:
    """Steps in both forms.

    Args:
        single: one step.
        row: several steps, which the single-threaded executor runs; None if it cannot, or need not.
    """

    single: Step
    row: Row | None


class StepRows:
    """Unrolls steps of workers, see the module.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None:
        self._suits = _workers_have_one_thread(context)
        self._is_logged = False

    def most(self, steps: int) -> int:
        """Returns how many steps may be one function.

        Args:
            steps: as many may be certain to be taken.
        """
        return min(steps, MOST_TOGETHER) if self._suits else 1

    def unrolled(self, step: Step, start: Sequence[Any], several: int) -> Unrolled:
        """Adds steps to the function that is being traced.

        Args:
            step: reads a batch first, and changes nothing if there is none.
            start: what the first step is called with: tensors in any structure.
            several: how many steps are one function, see `most`.
        """

        def own(*carried: Any) -> tuple[Sequence[Any], Sequence[tf.Tensor]]:
            return step(*tf.nest.map_structure(tf.identity, carried))  # a copy cannot wait for an argument itself

        with loops_kept_whole():
            copy = copied(own, *start) if several > 1 else None
            row = copy and self._row(copy, start, several)
        return Unrolled(copy if copy and row else step, row)

    def _row(self, copy: Step, start: Sequence[Any], several: int) -> Row | None:
        def function_of(count: int) -> Any:
            def take(*carried: Any) -> tuple[Sequence[Any], Sequence[Sequence[tf.Tensor]]]:
                left: Sequence[Any] = carried
                told = []
                for _ in range(count):
                    left, own = copy(*left)
                    told.append(own)
                return left, told

            return function_kept_whole(take).get_concrete_function(*start)

        # Two steps have all that many have, and TensorFlow optimizes them in a fraction of the time.
        if refusal := why_not_in_order(function_of(2)):
            self._log(refusal)
            return None
        function = function_of(several)

        def call(*carried: Any) -> Any:
            with tf.experimental.function_executor_type(SINGLE_THREADED):
                return function(*carried)

        return call

    def _log(self, reason: str) -> None:
        """Logs once that TensorFlow's default executor runs the steps, though workers have one thread."""
        if not self._is_logged:
            self._is_logged = True
            log.info("TensorFlow's default executor runs the steps, not the single-threaded one: %s", reason)


def _workers_have_one_thread(context: ParameterServerContext) -> bool:
    """Whether all workers have a single thread for an operation; false if one is lost."""
    function = tf.function(one_thread, autograph=False)
    asked = [context.run_on_worker(worker, function) for worker in context.workers]
    try:
        return all(bool(answer.fetch()) for answer in asked)
    except tf.errors.OpError as error:
        log.debug("a worker is lost, so the default executor runs its steps: %s", error)
        return False
