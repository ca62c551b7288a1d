"""The length of the data: the steps of one pass over it, and each worker's shard."""

from __future__ import annotations

import logging

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.spec.strategies import computes_gradients
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.data.length import is_endless, steps_in
from tfdist_cli.train.data.shard import DatasetFunction, Shard
from tfdist_cli.train.engine.base import Rules, Sharing

ONE_READER = ("service", "coordinator")
"""Ways to share data in which the workers' batches are those of one shard."""

log = logging.getLogger("tfdist")


def check_ends(data: DatasetFunction, shard: Shard) -> None:
    """Checks that data without a known length ends.

    Raises:
        TrainingError: it repeats without end.
    """
    if is_endless(data, shard):
        raise TrainingError(
            "the training data never ends, so nothing tells how long an epoch is",
            code="endless-epoch",
            hint="give steps_per_epoch, or remove .repeat()",
        )


def warn_of_short_epochs(steps_per_epoch: int, steps_per_pass: int | None) -> None:
    """Logs that the data ends within an epoch."""
    if steps_per_pass and steps_per_pass % steps_per_epoch:
        log.warning(
            "the data ends after %d steps, within an epoch of %d: that epoch ends early, and the data starts again "
            "with the next one; .repeat() on a dataset continues across its end",
            steps_per_pass,
            steps_per_epoch,
        )


def steps_of_one_pass(
    context: ClusterContext, data: DatasetFunction, rules: Rules, share: Sharing, workers: int | None = None
) -> int:
    """Returns the global steps of one pass over the data: by all workers together, or by each if each sees all of it.

    Args:
        context: this process in its cluster.
        data: one pass over the data.
        rules: how gradients become updates.
        share: what each worker sees.
        workers: how many workers there are; by default those of now.

    Raises:
        TrainingError: the data has no known length, or is empty.
    """
    steps = known_steps_of_pass(context, data, rules, share, workers)
    if steps is None:
        raise TrainingError(
            f"the training data has no known length for {workers or number_of_workers(context)} workers, which "
            "steps_per_epoch follows from",
            code="unknown-data-length",
            hint="give steps_per_epoch",
        )
    return steps


def known_steps_of_pass(
    context: ClusterContext, data: DatasetFunction, rules: Rules, share: Sharing, workers: int | None = None
) -> int | None:
    """Returns what `steps_of_one_pass` does; None if the data has no known length.

    Raises:
        TrainingError: the data is empty.
    """
    coordinated = context.environment.traits.has_ps
    asynchronous = coordinated and not rules.updates.synchronous
    workers = workers or number_of_workers(context)
    shards = worker_shards(context, share, workers)
    steps = steps_in(data, shards, synchronous=not asynchronous)
    if steps is None:
        return None
    if steps == 0:
        raise TrainingError(
            f"the training data has no full batch for each of {workers} workers",
            code="no-full-batch",
            hint="use a smaller batch_size, fewer workers, or more data",
        )
    if asynchronous:
        return steps
    replicas = workers if coordinated else context.replicas
    return max(1, steps // (replicas if share in ONE_READER else replicas // workers))


def batches_per_step(context: ClusterContext, updates: Updates | None) -> int:
    """Returns how many batches all workers together train on in a global step."""
    if not context.environment.traits.has_ps:
        return context.replicas
    return number_of_workers(context) if updates and updates.synchronous else 1


def worker_shards(context: ClusterContext, share: Sharing, workers: int | None = None) -> list[Shard]:
    """Returns each worker's shard of the data; a single shard with all of it if data workers prepare it."""
    if share in ONE_READER:
        return [Shard()]
    workers = workers or number_of_workers(context)
    split = share == "split"
    return [Shard(n if split else 0, workers if split else 1, n) for n in range(workers)]


def number_of_workers(context: ClusterContext) -> int:
    """Returns how many workers compute gradients of batches of their own."""
    environment = context.environment
    if context.joins:
        return len(context.joins.membership.members)
    if environment.traits.staged:
        return 1  # the chief reads the data
    return sum(computes_gradients(environment.strategy, task.role) for task in environment.members)
