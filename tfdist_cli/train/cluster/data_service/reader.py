"""Reads batches from data workers.

A reader prefetches, and no other reader gets its batches. So if one process can read for all, it does: with parameter
servers the chief reads, and its next batch goes to the worker that asks first. Mirrored workers have no such process:
they read the same pass concurrently, and one may start the next pass while another still has a batch of this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import tensorflow as tf

from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.train.cluster.data_service.members import DataWorkers
from tfdist_cli.train.cluster.data_service.server import DISPATCHER, IS_LEAVING, PROTOCOL
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.pipeline import Pipeline
from tfdist_cli.train.data.service_support import check_served
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.tf_compat.data import batch_size, distributed, is_deterministic
from tfdist_cli.train.tf_compat.data_service.draining import ending_on_request
from tfdist_cli.train.tf_compat.eager_context import global_seed_of

_REFRESH_MS = 20
"""How often a reader asks whether a pass has ended. TensorFlow's default would delay the end of each pass by 1 s."""

Lengths = Mapping[tuple[int, int], int]
"""The elements of shards, by their index and count."""
_NO_LENGTHS: Lengths = {}
_trainings = itertools.count()


@dataclass(frozen=True)
class DataService:
    """The service, as seen by the tasks that train.

    Args:
        dispatcher: the dispatcher's address, as gRPC takes it.
        workers: the most data workers that there may be.
        readers: the number of tasks that read, each a part of every pass.
        number: the number of the training in this program; tasks that read the same pass have the same number.
        may_leave: whether data workers may leave while a pass is read.
    """

    dispatcher: str
    workers: int = 1
    readers: int = 1
    number: int = 0
    may_leave: bool = False

    @classmethod
    def of(cls, environment: Environment, members: DataWorkers | None = None) -> DataService:
        """Returns the service of this cluster, for one training.

        Args:
            environment: the environment of this task.
            members: the data workers, if they may leave the training.

        Raises:
            UsageError: the cluster has no data workers.
        """
        address = environment.addresses.get(DISPATCHER)
        if address is None:
            raise UsageError(
                "the recipe reads from data workers, and this cluster has none",
                code="no-data-workers",
                hint="write 'data_dispatcher: {}' and 'data_worker: {replicas: 2}' in the cluster file's roles",
            )
        readers = len(environment.members) if environment.traits.together else 1
        dispatcher = members.dispatcher() if members else str(address)
        workers = max(len(environment.data_service) - 1, environment.max_data_workers)
        return cls(dispatcher, workers, readers, next(_trainings), may_leave=members is not None)

    def batches(self, examples: DatasetFunction, pipeline: Pipeline, lengths: Lengths = _NO_LENGTHS) -> DatasetFunction:
        """Makes batches of a recipe's examples on the data workers.

        The last batch of each data worker in a pass has the remaining examples. They are merged here, so that all
        batches are full: a batch may contain the end of one pass and the start of the next.

        Args:
            examples: the examples of a shard.
            pipeline: makes the batches.
            lengths: the examples of shards that were counted.
        """
        size = pipeline.batch_size

        def read(shard: Shard) -> tf.data.Dataset:
            with _without_seed():
                part = examples(replace(shard, step=0))
                buffer = pipeline.buffer(part)
                once = self._pass((part.shuffle(buffer) if buffer else part).batch(size))
            many = once.repeat() if pipeline.repeat else once
            length = cardinality(part) or lengths.get((shard.index, shard.count))
            together = size * self.readers
            skipped = shard.step * together % length // together if length else 0
            return many.rebatch(size, drop_remainder=True).skip(skipped).prefetch(self._prefetched)

        return read

    def whole_batches(
        self, function: DatasetFunction, lengths: Lengths = _NO_LENGTHS, *, repeat: bool
    ) -> DatasetFunction:
        """Moves a user's pipeline of batches to the data workers.

        Args:
            function: makes the batches of a shard.
            lengths: the batches of shards that were counted.
            repeat: whether the data starts again when it ends.
        """

        def read(shard: Shard) -> tf.data.Dataset:
            with _without_seed():
                part = checked(function, replace(shard, step=0))
                once = self._pass(part)
            size, length = batch_size(part), cardinality(part) or lengths.get((shard.index, shard.count))
            once = once.rebatch(size) if size else once  # merges the incomplete last batch of each data worker
            skipped = shard.step * self.readers % length // self.readers if length and repeat else shard.step
            return (once.repeat() if repeat else once).skip(skipped).prefetch(self._prefetched)

        return read

    @property
    def _prefetched(self) -> int:
        """The number of batches that a reader prefetches: few if there are other readers."""
        return 1 if self.readers > 1 else tf.data.AUTOTUNE

    def _pass(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns one pass over the elements, in the order in which the data workers finish them."""
        check_served(dataset, self.workers)
        return distributed(
            ending_on_request(dataset, IS_LEAVING) if self.may_leave else dataset,
            f"{PROTOCOL}://{self.dispatcher}",
            refresh_ms=_REFRESH_MS,
            job_name=f"training-{self.number}" if self.readers > 1 else None,
            max_outstanding_requests=self.workers if self.readers > 1 else None,
        )


@contextmanager
def _without_seed() -> Iterator[None]:
    """Within the context, the data's random operations get no seed, so that each pass draws new numbers.

    Every data worker starts each pass anew: with a seed, all passes of all data workers would draw the same numbers.
    They do with deterministic operations, for which TensorFlow demands a seed.
    """
    if is_deterministic():
        yield
        return
    with global_seed_of(None):
        yield
