"""Synchronous and bounded updates: several workers' gradients make one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.lockstep.updates import LockstepUpdates
from tfdist_cli.train.engine.parameter_server.quorum.updates import QuorumUpdates
from tfdist_cli.train.optimizers.apply import innermost


class SynchronousUpdates:
    """Runs workers in lockstep if each update takes one gradient of every worker, otherwise with a quorum.

    In lockstep workers and ps need no decision of the chief. With backup workers or staleness, the chief decides which
    gradients make an update.

    Args:
        context: the model on its cluster.
        before: the rule of another number of workers.

    Attributes:
        updates: in lockstep, or with a quorum.
    """

    def __init__(self, context: ParameterServerContext, before: SynchronousUpdates | None = None) -> None:
        self.updates: LockstepUpdates | QuorumUpdates = _updates(context, before.updates if before else None)

    @classmethod
    def check(cls, updates: Updates, optimizer: keras.optimizers.Optimizer, workers: int) -> None:
        """See `UpdateRule.check`."""
        if updates.staleness and innermost(optimizer) is not optimizer:
            raise TrainingError(
                "updates.staleness needs unscaled gradients, since those of one update may have different scales, but "
                "the optimizer scales the loss (mixed_float16)",
                code="loss-scaling-unsupported",
                hint="use the mixed_bfloat16 policy, or remove staleness",
            )
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

    def resized(self, context: ParameterServerContext) -> SynchronousUpdates:
        """See `UpdateRule.resized`."""
        return SynchronousUpdates(context, self)

    def rehearse(self, workers: Sequence[Any], iterators: Any, size: int) -> None:
        """See `UpdateRule.rehearse`."""
        self.updates.rehearse(workers, iterators, size)

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `UpdateRule.run`."""
        del adapts  # both measure the steps, and order few at a time where steps take long
        return self.updates.run(iterators, steps, first=first, size=size, pause=pause)

    def share_changes(self) -> None:
        """Does nothing: no step is taken while callbacks are called."""

    def read_updates(self) -> None:
        """Does nothing: updates are made where the variables are."""

    def close(self) -> None:
        """Nothing goes on beside runs."""


def _updates(
    context: ParameterServerContext, before: LockstepUpdates | QuorumUpdates | None
) -> LockstepUpdates | QuorumUpdates:
    all_take_part = context.batches_per_update == context.worker_count
    if all_take_part and not context.rules.updates.staleness:
        return LockstepUpdates(context, before if isinstance(before, LockstepUpdates) else None)
    return QuorumUpdates(context, before if isinstance(before, QuorumUpdates) else None)
