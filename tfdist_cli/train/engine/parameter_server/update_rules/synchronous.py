"""Synchronous and bounded updates: several workers' gradients make one update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.lockstep.updates import LockstepUpdates
from tfdist_cli.train.engine.parameter_server.quorum.updates import QuorumUpdates


class SynchronousUpdates:
    """Runs workers in lockstep if each update takes one gradient of every worker, otherwise with a quorum.

    In lockstep workers and ps need no decision of the chief. With backup workers or staleness, the chief decides which
    gradients make an update.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None:
        updates, workers = context.rules.updates, len(context.workers)
        all_take_part = self.batches_per_update(updates, workers) == workers
        lockstep = all_take_part and not updates.staleness
        self._updates = LockstepUpdates(context) if lockstep else QuorumUpdates(context)

    @classmethod
    def check(cls, updates: Updates, optimizer: keras.optimizers.Optimizer, workers: int) -> None:  # noqa: ARG003 any optimizer does
        """See `UpdateRule.check`."""
        if updates.aggregate is not None and updates.aggregate > workers:
            raise TrainingError(
                f"updates.aggregate is {updates.aggregate}, but there are only {workers} workers",
                code="too-few-workers",
                hint="set aggregate to at most the number of workers",
            )

    @classmethod
    def batches_per_update(cls, updates: Updates, workers: int) -> int:
        """One of each worker, unless `aggregate` says otherwise."""
        return updates.aggregate or workers

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `UpdateRule.run`."""
        del adapts  # both measure the steps, and order few at a time where steps take long
        return self._updates.run(iterators, steps, first=first, size=size, pause=pause)
