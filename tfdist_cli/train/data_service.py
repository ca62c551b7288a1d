"""tf.data's service: batches are prepared by data workers, and each example comes once in a pass.

The dispatcher deals out the source of the data (elements, or names of files) to the data workers as they ask for more;
they map, shuffle and batch. Each pass has one reader, whose stream ends when every example of the pass has been read:
the next pass begins after that. With parameter servers the reader is on the chief, and its next batch goes to whichever
worker asks first: readers of their own would each keep batches of a pass that has ended for the others. Tasks that step
together read a part of the data each.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.eager import context

from tfdist_cli.environment import Environment
from tfdist_cli.errors import TimeoutExceeded, TrainingError, UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.data import DatasetFunction, Pipeline, Shard, cardinality, checked
from tfdist_cli.train.presence import outlast, port_taken

_PROTOCOL = "grpc"
_REFRESH_MS = 20
"""How often a reader asks whether a pass has ended. TensorFlow's own second would pass at the end of each."""
_HEARTBEAT_MS = 1000

DISPATCHER = TaskId("data_dispatcher")


@dataclass(frozen=True)
class DataService:
    """The service as a task that trains sees it.

    Args:
        dispatcher: where the dispatcher listens.
    """

    dispatcher: Address

    @classmethod
    def of(cls, environment: Environment) -> DataService:
        """The service of this cluster.

        Raises:
            UsageError: it has none.
        """
        address = environment.addresses.get(DISPATCHER)
        if address is None:
            raise UsageError(
                "the data is to come from data workers, and this cluster has none",
                hint="write 'data_dispatcher: {}' and 'data_worker: {replicas: 2}' in the cluster file's roles",
            )
        return cls(address)

    def one_pass(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same elements, once, in the order in which the data workers have them ready."""
        # The public function does not say how often to ask for the end.
        distribute = data_service_ops._distribute(
            tf.data.experimental.service.ShardingPolicy.DYNAMIC,
            f"{_PROTOCOL}://{self.dispatcher}",
            task_refresh_interval_hint_ms=_REFRESH_MS,
        )
        return dataset.apply(distribute)

    def batches(self, examples: Callable[[Shard], tf.data.Dataset], pipeline: Pipeline) -> DatasetFunction:
        """Turns a recipe's examples into batches, on the data workers.

        Each data worker's last batch of a pass is what is left there; they are put together here, so that batches are
        full, and one may hold the end of one pass and the beginning of the next.
        """
        size = pipeline.batch_size

        def read(shard: Shard) -> tf.data.Dataset:
            with _without_seed():
                part = examples(replace(shard, step=0))
                buffer = pipeline.buffer(part)
                once = self.one_pass((part.shuffle(buffer) if buffer else part).batch(size))
            many = once.repeat() if pipeline.repeat else once
            length = cardinality(part)
            skipped = shard.step * size % length // size if length else 0
            return many.rebatch(size, drop_remainder=True).skip(skipped).prefetch(tf.data.AUTOTUNE)

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
                once = self.one_pass(part)
            length = cardinality(part)
            skipped = shard.step % length if length and repeat else shard.step
            return (once.repeat() if repeat else once).skip(skipped).prefetch(tf.data.AUTOTUNE)

        return read


@contextmanager
def _without_seed() -> Iterator[None]:
    """Lets random operations of the data draw new numbers in each pass.

    A pass begins anew on every data worker: with a seed, each would be like the first, and like those of the others.
    """
    seed = context.global_seed()
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
        config = service.WorkerConfig(
            dispatcher_address=str(DataService.of(environment).dispatcher),
            worker_address=str(own),
            port=own.port,
            protocol=_PROTOCOL,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            dispatcher_timeout_ms=int(environment.start_timeout * 1000),
        )
        _kept.append(service.WorkerServer(config))
    except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError) as error:
        raise TimeoutExceeded(str(error)) from error
    except tf.errors.OpError as error:
        raise port_taken(task, own, error.message) from error


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
        hint=f"{task}'s own output says why; start all tasks again: training goes on from its last checkpoint",
    )


def end_process(error: TrainingError) -> None:
    """Says an error and ends the process: its main thread waits in TensorFlow, which nothing can interrupt."""
    sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)
