"""tf.data's service: batches are prepared by data workers, and each example comes once in a pass.

The dispatcher deals out the source of the data (elements, or names of files) to the data workers as they ask for more;
they map, shuffle and batch. A pass ends when every example of it has been read, and the next one begins after that.

A reader fetches ahead, and what it holds is nobody else's. So where one process can read for all, it does: with
parameter servers the chief reads, and its next batch goes to whichever worker asks first. Tasks that step together have
no such process; they read the same pass side by side, and one may begin the next while another still holds a batch.
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

from tfdist_cli.errors import TimeoutExceeded, TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.reachability import await_up
from tfdist_cli.train.cluster.rendezvous import outlast, port_taken
from tfdist_cli.train.data.pipeline import DatasetFunction, Pipeline, Shard, cardinality, checked
from tfdist_cli.train.data.service_support import check_served
from tfdist_cli.train.tf_compat.data import batch_size, distributed
from tfdist_cli.train.tf_compat.eager_context import global_seed

_PROTOCOL = "grpc"
_REFRESH_MS = 20
"""How often a reader asks whether a pass has ended. TensorFlow's own second would pass at the end of each."""

DISPATCHER = TaskId("data_dispatcher")
_trainings = itertools.count()


@dataclass(frozen=True)
class DataService:
    """The service as the tasks that train see it.

    Args:
        dispatcher: where the dispatcher listens.
        workers: how many data workers there are.
        readers: how many tasks read, each a part of every pass.
        number: which training of this program it is for; tasks that read the same pass agree on it.
    """

    dispatcher: Address
    workers: int = 1
    readers: int = 1
    number: int = 0

    @classmethod
    def of(cls, environment: Environment) -> DataService:
        """The service of this cluster, for one training.

        Raises:
            UsageError: the cluster has none.
        """
        address = environment.addresses.get(DISPATCHER)
        if address is None:
            raise UsageError(
                "the data is to come from data workers, and this cluster has none",
                hint="write 'data_dispatcher: {}' and 'data_worker: {replicas: 2}' in the cluster file's roles",
            )
        readers = len(environment.members) if environment.traits.together else 1
        return cls(address, len(environment.data_service) - 1, readers, next(_trainings))

    def batches(self, examples: DatasetFunction, pipeline: Pipeline) -> DatasetFunction:
        """Turns a recipe's examples into batches, on the data workers.

        Each data worker's last batch of a pass is what is left there; they are put together here, so that batches are
        full, and one may hold the end of one pass and the beginning of the next.
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
            return many.rebatch(size, drop_remainder=True).skip(skipped).prefetch(self._ahead)

        return read

    def whole_batches(self, function: DatasetFunction, *, repeat: bool) -> DatasetFunction:
        """Moves a user's own pipeline of batches to the data workers.

        Args:
            function: a shard → its batches.
            repeat: whether the data starts again when it ends.
        """

        def read(shard: Shard) -> tf.data.Dataset:
            with _without_seed():
                part = checked(function, replace(shard, step=0))
                once = self._pass(part)
            size, length = batch_size(part), cardinality(part)
            once = once.rebatch(size) if size else once  # each data worker has ended the pass with what was left there
            skipped = shard.step * self.readers % length // self.readers if length and repeat else shard.step
            return (once.repeat() if repeat else once).skip(skipped).prefetch(self._ahead)

        return read

    @property
    def _ahead(self) -> int:
        """Batches that a reader keeps ready: few where others could have had them."""
        return 1 if self.readers > 1 else tf.data.AUTOTUNE

    def _pass(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same elements, once, in the order in which the data workers have them ready."""
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
    """Lets random operations of the data draw new numbers in each pass.

    A pass begins anew on every data worker: with a seed, each would be like the first, and like those of the others.
    """
    seed = global_seed()
    tf.random.set_seed(None)
    try:
        yield
    finally:
        tf.random.set_seed(seed)


_kept: list[Any] = []
"""The server of this process. To stop one takes as long as its dispatcher and its readers do not answer."""


def start_server(environment: Environment) -> None:
    """Starts the server of a data dispatcher or a data worker, which serves as long as the process lives.

    It has to be ended by `os._exit`.

    Raises:
        TrainingError: the port is taken.
        TimeoutExceeded: a data worker's dispatcher has not come up in time.
    """
    task = environment.task
    own = environment.addresses[task]
    service = tf.data.experimental.service
    try:
        if task == DISPATCHER:
            _kept.append(service.DispatchServer(service.DispatcherConfig(port=own.port, protocol=_PROTOCOL)))
            return
        dispatcher = environment.addresses[DISPATCHER]
        await_up({DISPATCHER: dispatcher}, environment.start_timeout)  # TensorFlow would wait for it for an hour
        config = service.WorkerConfig(
            dispatcher_address=str(dispatcher), worker_address=str(own), port=own.port, protocol=_PROTOCOL
        )
        _kept.append(service.WorkerServer(config))
    except (RuntimeError, tf.errors.OpError) as error:
        if "start gRPC server" not in str(error):
            raise
        raise port_taken(task, own, "the port is in use") from error


def watch(environment: Environment, lost: Callable[[TrainingError], Any]) -> None:
    """Calls `lost` once when a task of the service has ended while this process still runs.

    A reader would wait for it for ever: the examples that it had been dealt are given to nobody else.
    """
    first = threading.Lock()

    def follow(task: TaskId, address: Address) -> None:
        with suppress(TimeoutExceeded):  # it had gone already
            outlast(environment.task, address, timeout=0)
        if first.acquire(blocking=False):
            lost(_gone(task, address))

    for task, address in environment.data_service.items():
        threading.Thread(target=follow, args=(task, address), name=f"watch-{task}", daemon=True).start()


def _gone(task: TaskId, address: Address) -> TrainingError:
    what = "nobody deals out the data any more" if task == DISPATCHER else "the examples it had been dealt are lost"
    return TrainingError(
        f"{task} at {address} has ended before the training: {what}",
        code="task-lost",
        hint=f"{task}'s own output says why; start all tasks again: training goes on from its last checkpoint",
    )


def end_process(error: TrainingError) -> None:
    """Says an error and ends the process: its main thread waits in TensorFlow, which nothing can interrupt."""
    sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)
