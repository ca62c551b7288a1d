"""`tf.data`'s service: data workers prepare the batches, and each pass has each example once.

The dispatcher distributes the source of the data (elements, or names of files) to the data workers on request; they
map, shuffle and batch. A pass ends when all its examples have been read; then the next one starts.

A reader prefetches, and no other reader gets its batches. So if one process can read for all, it does: with parameter
servers the chief reads, and its next batch goes to the worker that asks first. Mirrored workers have no such process:
they read the same pass concurrently, and one may start the next pass while another still has a batch of this one.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TimeoutExceeded, TrainingError, UsageError, label
from tfdist_cli.protocol import task_events
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.reachability import await_up
from tfdist_cli.train.cluster.rendezvous import port_in_use, wait_until_exited
from tfdist_cli.train.data.pipeline import DatasetFunction, Pipeline, Shard, cardinality, checked
from tfdist_cli.train.data.service_support import check_served
from tfdist_cli.train.tf_compat.data import batch_size, distributed
from tfdist_cli.train.tf_compat.eager_context import global_seed

_PROTOCOL = "grpc"
_REFRESH_MS = 20
"""How often a reader asks whether a pass has ended. TensorFlow's default would delay the end of each pass by 1 s."""

DISPATCHER = TaskId("data_dispatcher")
_trainings = itertools.count()


@dataclass(frozen=True)
class DataService:
    """The service, as seen by the tasks that train.

    Args:
        dispatcher: the dispatcher's address.
        workers: the number of data workers.
        readers: the number of tasks that read, each a part of every pass.
        number: the number of the training in this program; tasks that read the same pass have the same number.
    """

    dispatcher: Address
    workers: int = 1
    readers: int = 1
    number: int = 0

    @classmethod
    def of(cls, environment: Environment) -> DataService:
        """Returns the service of this cluster, for one training.

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
        return cls(address, len(environment.data_service) - 1, readers, next(_trainings))

    def batches(self, examples: DatasetFunction, pipeline: Pipeline) -> DatasetFunction:
        """Makes batches of a recipe's examples on the data workers.

        The last batch of each data worker in a pass has the remaining examples. They are merged here, so that all
        batches are full: a batch may contain the end of one pass and the start of the next.
        """
        size = pipeline.batch_size

        def read(shard: Shard) -> tf.data.Dataset:
            with _without_seed():
                part = examples(replace(shard, step=0))
                buffer = pipeline.buffer(part)
                once = self._pass((part.shuffle(buffer) if buffer else part).batch(size))
            many = once.repeat() if pipeline.repeat else once
            length = cardinality(part)
            together = size * self.readers
            skipped = shard.step * together % length // together if length else 0
            return many.rebatch(size, drop_remainder=True).skip(skipped).prefetch(self._prefetched)

        return read

    def whole_batches(self, function: DatasetFunction, *, repeat: bool) -> DatasetFunction:
        """Moves a user's pipeline of batches to the data workers.

        Args:
            function: makes the batches of a shard.
            repeat: whether the data starts again when it ends.
        """

        def read(shard: Shard) -> tf.data.Dataset:
            with _without_seed():
                part = checked(function, replace(shard, step=0))
                once = self._pass(part)
            size, length = batch_size(part), cardinality(part)
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
            dataset,
            f"{_PROTOCOL}://{self.dispatcher}",
            refresh_ms=_REFRESH_MS,
            job_name=f"training-{self.number}" if self.readers > 1 else None,
            max_outstanding_requests=self.workers if self.readers > 1 else None,
        )


@contextmanager
def _without_seed() -> Iterator[None]:
    """Within the context, the data's random operations get no seed, so that each pass draws new numbers.

    Every data worker starts each pass anew: with a seed, all passes of all data workers would draw the same numbers.
    """
    seed = global_seed()
    tf.random.set_seed(None)
    try:
        yield
    finally:
        tf.random.set_seed(seed)


_kept: list[Any] = []
"""The server of this process. It is never stopped, which may take long if dispatcher or readers do not answer."""


def start_server(environment: Environment) -> None:
    """Starts the server of a data dispatcher or a data worker, which runs as long as the process.

    The process has to exit by `os._exit`, without stopping the server.

    Raises:
        TrainingError: the port is in use.
        TimeoutExceeded: the dispatcher of a data worker did not start in time.
    """
    task = environment.task
    own = environment.addresses[task]
    service = tf.data.experimental.service
    try:
        if task == DISPATCHER:
            _kept.append(service.DispatchServer(service.DispatcherConfig(port=own.port, protocol=_PROTOCOL)))
            return
        dispatcher = environment.addresses[DISPATCHER]
        await_up({DISPATCHER: dispatcher}, environment.start_timeout)  # TensorFlow would wait an hour for it
        config = service.WorkerConfig(
            dispatcher_address=str(dispatcher), worker_address=str(own), port=own.port, protocol=_PROTOCOL
        )
        _kept.append(service.WorkerServer(config))
    except (RuntimeError, tf.errors.OpError) as error:
        if "start gRPC server" not in str(error):
            raise
        raise port_in_use(task, own, "the port is in use") from error


def watch(environment: Environment, lost: Callable[[TrainingError], Any]) -> None:
    """Calls `lost` once when a task of the service exits while this process still runs.

    A reader would wait forever: the examples that were distributed to that task are not given to another one.
    """
    first = threading.Lock()

    def follow(task: TaskId, address: Address) -> None:
        with suppress(TimeoutExceeded):  # it had exited before
            wait_until_exited(environment.task, address, timeout=0)
        if first.acquire(blocking=False):
            lost(_task_lost(task, address))

    for task, address in environment.data_service.items():
        threading.Thread(target=follow, args=(task, address), name=f"watch-{task}", daemon=True).start()


def _task_lost(task: TaskId, address: Address) -> TrainingError:
    what = (
        "the data is not distributed any more" if task == DISPATCHER else "the examples that it had received are lost"
    )
    return TrainingError(
        f"{task} at {address} exited before the training ended: {what}",
        code="task-lost",
        hint=f"see the output of {task} for the reason; then start all tasks again: training continues from its last "
        "checkpoint",
    )


def end_process(error: TrainingError) -> None:
    """Prints an error and exits at once: the main thread waits in TensorFlow, which cannot be interrupted."""
    sys.stderr.write(f"{label(error.code)}: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
    task_events.exited(error.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)
