"""Predictions by the workers of parameter servers, which the chief collects in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.spec.sections.updates import EmbeddingRule
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE, raise_cause
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.model.compute_device import worker_device_scope
from tfdist_cli.train.prediction.function import Leaves, PredictionFunction
from tfdist_cli.train.prediction.groups import Groups
from tfdist_cli.train.tf_compat.coordinator import clear_failure, failure_of, is_dead, reserve_function_table
from tfdist_cli.train.tf_compat.data import calls_python

_POLL_SECONDS = 0.1
_kept_open: list[Any] = []
"""Iterators over data that calls Python code of this process: a worker that closes one early may wait for it."""


def predict_on_workers(context: ClusterContext, model: keras.Model, groups: Groups) -> tuple[Any, Iterator[Leaves]]:
    """Predicts groups; see `predict_groups`."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(context.strategy)
    clear_failure(coordinator)
    workers = Workers(coordinator, context.joins.membership if context.joins else None)
    reserve_function_table([worker.device_name for worker in workers], workers.most)
    with context.strategy.scope():
        function = PredictionFunction(model, groups.input_spec, EmbeddingRule().min_bytes, worker_device_scope())
        predict = function.compiled(groups.size).get_concrete_function()
    streams = [Stream(workers, place, predict, groups) for place in range(groups.count)]
    return function.outputs, _collected(streams)


def _collected(streams: Sequence[Stream]) -> Iterator[Leaves]:
    """Yields the groups in order. Each worker predicts one group ahead."""
    try:
        for stream in streams:
            stream.begin()
        while True:
            for stream in streams:
                leaves = stream.take()
                if leaves is None:
                    return
                yield leaves
    except Exception as error:  # noqa: BLE001 it is raised again, or its cause
        raise_cause(error)


class _Opened:
    """The iterator of a stream on its worker, and the group that it comes to next."""

    def __init__(self) -> None:
        self.iterator: Any = None
        self.position = -1

    def open(self, dataset: tf.data.Dataset) -> None:
        """Opens the data on the current device."""
        self.iterator = iter(dataset)
        if calls_python(dataset):
            _kept_open.append(self.iterator)


class Stream:
    """The groups g, g + n, g + 2·n … of the data. If the worker that predicts them is lost, another one continues.

    Args:
        workers: the workers.
        place: the first group.
        predict: the function of an iterator; see `PredictionFunction.compiled`.
        groups: the data.
    """

    def __init__(self, workers: Workers, place: int, predict: Any, groups: Groups) -> None:
        self._workers, self._place, self._predict, self._groups = workers, place, predict, groups
        self._next = place
        self._worker: Any = workers[place]
        self._opened = _Opened()
        self._pending: Any = None

    def begin(self) -> None:
        """Requests the next group."""
        first, opened, runs = self._next, self._opened, [0]

        def group() -> list[tf.Tensor]:
            """Runs for the worker, and again if it is replaced, whose iterator is lost then."""
            runs[0] += 1
            if opened.position != first or runs[0] > 1:
                opened.open(self._groups.batches(self._place, first))
            opened.position = first + self._groups.count
            predicted = self._predict(opened.iterator)
            with tf.device(CHIEF_DEVICE):  # a worker that has predicted may fail
                return [tf.identity(each) for each in predicted]

        self._pending = self._worker.create_resource(group)

    def take(self) -> Leaves | None:
        """Waits for the next group, and requests the one after it; None at the end of the data."""
        while True:
            try:
                fetched = self._pending.fetch()
            except tf.errors.CancelledError:
                if failure_of(self._pending) is not None:
                    raise  # the function itself was cancelled
                self._move()
                continue
            break
        batches, *leaves = fetched
        if not int(batches):
            return None
        self._next += self._groups.count
        self.begin()
        return [np.asarray(leaf) for leaf in leaves]

    def _move(self) -> None:
        """Requests the group that was lost from a worker that runs."""
        self._opened, self._worker = _Opened(), self._live_worker()
        self.begin()

    def _live_worker(self) -> Any:
        pause = threading.Event()
        while True:
            alive = [worker for worker in self._workers if not is_dead(worker)]
            if alive:
                return self._worker if self._worker in alive else alive[self._place % len(alive)]
            pause.wait(_POLL_SECONDS)  # TensorFlow has no event for a worker that is back
