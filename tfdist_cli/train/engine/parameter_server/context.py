"""State shared by all update rules: the model, the workers, the transport and the metrics."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.pipeline import ended_early
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.model.assignments import Optimizer
from tfdist_cli.train.model.embeddings import EmbeddingTables
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep, Tensors
from tfdist_cli.train.optimizers.apply import (
    StoredParameter,
    apply,
    apply_on_device,
    is_divided_by_devices,
    stored_parameters,
)
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import kernels_disabled
from tfdist_cli.train.optimizers.terms import Terms, split_gradient
from tfdist_cli.train.optimizers.update_numbers import UpdateCounts, learning_rate_at
from tfdist_cli.train.tf_compat.coordinator import Cancellation, as_coordinator_calls, concrete_on, failure_of, is_dead
from tfdist_cli.train.tf_compat.keras_optimizer import iterations, learning_rate
from tfdist_cli.train.variables.sharding import Gradient, assign, parts

CHIEF_DEVICE = "/job:chief/replica:0/task:0/device:CPU:0"
_POLL_SECONDS = 0.1
_DATASET_OF_CHIEF = "Unable to parse tensor proto"
"""Part of the error of a worker that is sent a dataset of the chief, which is no tensor that could be sent."""


@dataclass(frozen=True)
class ParameterServerContext:
    """A model on its cluster.

    Args:
        step: the model's pure functions.
        element_spec: the `tf.TypeSpec`s of a worker's batch.
        coordinator: TensorFlow's.
        workers: TensorFlow's workers, in order; those of an elastic cluster change.
        rules: how gradients become updates.
        tables: the model's tables that are looked up.
        transport: moves parameters and gradients between workers and ps.
        seeds: the model's seed counters.
        assigned: the indices of the state variables that a step assigns, without the seeds, and which part of its old
            value a step leaves in each.
        totals: packs metrics.
        rate: scales the learning rate.
        batches_per_update: how many batches of workers make one update.
        worker_count: how many workers the updates are made for; those of asynchronous updates may change.
        shares_memory: whether these workers share memory with the ps.
    """

    step: ModelStep
    element_spec: Any
    coordinator: Any
    workers: Workers
    rules: Rules
    tables: EmbeddingTables
    transport: Transport
    seeds: SeedCounters
    assigned: Mapping[int, float]
    totals: MetricTotals
    rate: RateScaling | None
    batches_per_update: int
    worker_count: int
    shares_memory: bool

    @property
    def counts(self) -> list[int]:
        """What differs from run to run: an argument, int64, of functions that are the same for any number of workers.

        `batches_per_update`, and `SeedCounters.numbers` of step 0.
        """
        return [self.batches_per_update, *self.seeds.numbers(0)]

    def apply(self, gradients: list[Gradient], present: list[bool], counts: UpdateCounts | None = None) -> tf.Tensor:
        """Updates the parameters; returns how many updates were applied before this one.

        Args:
            gradients: one per parameter, by shards.
            present: which parameters the loss depends on.
            counts: given if each ps counts its own updates.
        """
        given = [gradient if depends else None for gradient, depends in zip(gradients, present, strict=True)]
        with nullcontext() if self.rules.optimized else kernels_disabled():
            return apply(self.step.optimizer, given, self.step.parameters, self.rate, counts=counts)

    @property
    def updates_divide(self) -> bool:
        """Whether each ps can make its part of an update alone."""
        step, stored = self.step, [parts(variable) for variable in self.step.parameters]
        devices = {bucket.device for bucket in self.transport.buckets}
        return (
            self.rules.optimized
            and all(len(own) == 1 and own[0].shape.is_fully_defined() for own in stored)
            and is_divided_by_devices(step.optimizer, step.parameters)
            and iterations(step.optimizer).value.device in devices
        )

    def sent_rate(self) -> tf.Tensor:
        """What each ps needs of the learning rate for `apply_on`, float64, shape (): zero if it computes it itself."""
        rate = learning_rate(self.step.optimizer)
        if not isinstance(rate, keras.Variable):
            return tf.zeros([], tf.float64)
        return tf.cast(tf.identity(tf.convert_to_tensor(rate.value)), tf.float64)

    def apply_on(
        self, device: str, gradients: list[Gradient], present: list[bool], counts: UpdateCounts, sent_rate: tf.Tensor
    ) -> tf.Tensor:
        """Makes the part of an update that is on one ps, called on it, see `is_divided_by_devices`.

        Args:
            device: the ps.
            gradients: one per parameter, by shards; those of other ps are not used.
            present: which parameters the loss depends on.
            counts: of the updates on each ps.
            sent_rate: see `sent_rate`.

        Returns:
            How many updates were applied before this one.
        """
        stored = stored_parameters(self.step.optimizer, self.step.parameters)
        number = counts.on(device).assign_add(1, read_value=True) - 1
        given = [
            gradient if depends and each.shards[0].device == device else None
            for gradient, depends, each in zip(gradients, present, stored, strict=True)
        ]
        self.apply_to(stored, given, number, sent_rate)
        return number

    def apply_to(
        self,
        stored: Sequence[StoredParameter],
        gradients: Sequence[Gradient | None],
        number: tf.Tensor,
        sent_rate: tf.Tensor,
    ) -> None:
        """Updates parameters where this is called.

        Args:
            stored: all parameters, on any devices.
            gradients: one per parameter, by shards; None for those that stay as they are.
            number: how many updates were applied before this one.
            sent_rate: see `sent_rate`.
        """
        rate = learning_rate(self.step.optimizer)
        own_rate = (lambda: tf.cast(sent_rate, rate.dtype)) if isinstance(rate, keras.Variable) else rate
        apply_on_device(self.step.optimizer, gradients, stored, (learning_rate_at(own_rate, number, self.rate), number))

    def apply_within(self, optimizer: Optimizer, gradients: list[Any], variables: list[keras.Variable]) -> tf.Tensor:
        """Makes an update of a worker's step; returns how many updates the optimizer has made before this one.

        Args:
            optimizer: the optimizer.
            gradients: one for each variable, whole: a tensor or a `tf.IndexedSlices`.
            variables: the variables.
        """
        terms = self.terms(optimizer, variables)
        given = [
            split_gradient(gradient, parts(variable), terms.get(n))
            for n, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        ]
        with nullcontext() if self.rules.optimized else kernels_disabled():
            return apply(optimizer, given, variables, self.rate)

    def terms(
        self, optimizer: Optimizer | None = None, variables: Sequence[keras.Variable] | None = None
    ) -> dict[int, Terms]:
        """Returns what an update takes of each term of the gradients that have some, see `ModelStep.terms`."""
        return self.step.terms(self.element_spec, optimizer, variables)

    def assigned_of(self, state: Sequence[Any]) -> list[Any]:
        """Selects from items, one for each state variable, those of the variables that a step assigns."""
        return [state[index] for index in self.assigned]

    def assign_state(self, values: Tensors) -> None:
        """Assigns values, selected by `assigned_of`, to the state variables."""
        for variable, value in zip(self.assigned_of(self.step.state), values, strict=True):
            assign(variable, value)

    def run_on_worker(self, worker: Any, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs a function on a worker, and again if the worker is replaced while its `RemoteValue` is referenced."""
        return worker.create_resource(function, args=args)

    def rehearsal(
        self, worker: Any, function: Any, args: tuple[Any, ...], cancellation: Cancellation | None = None
    ) -> Callable[[], None]:
        """Traces a function, and returns one that calls it on a worker beside what that runs, and waits.

        The next call need not compile it.

        Args:
            worker: the worker.
            function: a `tf.function` that ends by itself.
            args: its arguments; iterators of all workers are those of this one.
            cancellation: may end the wait.
        """
        concrete, own = concrete_on(worker, function, args)
        cancelled = cancellation or Cancellation()

        def rehearse() -> None:
            with as_coordinator_calls(worker), tf.device(worker.device_name):
                cancelled.call(concrete, own)

        return rehearse

    def result_of(self, remote: Any, function: Callable[[], Any]) -> Any:
        """Waits for the result of a function that runs on a worker; if the worker is lost, another one runs it again.

        Args:
            remote: the function's `RemoteValue`.
            function: run again. What it returns has to be on the chief, or it could be lost with the worker.
        """
        while True:
            try:
                fetched = remote.fetch()
            except tf.errors.CancelledError:
                if failure_of(remote) is not None:
                    raise  # the function itself was cancelled
                fetched = None
            if fetched is not None:
                return fetched
            remote = self.run_on_worker(live_worker(self.workers), function)


class Stream:
    """Calls of a function on a worker, with an iterator that stays open from one to the next.

    If the worker is lost, another one continues: it opens the data at the position of the call that was lost.

    Args:
        workers: the workers.
        place: the index of the first worker to use.
        open_at: opens the data at a position, on the current device; returns the iterator.
        function: the function of the iterator and other arguments; returns tensors.
    """

    def __init__(
        self, workers: Workers, place: int, open_at: Callable[[int], Any], function: Callable[..., Sequence[tf.Tensor]]
    ) -> None:
        self._workers, self._place, self._open_at, self._function = workers, place, open_at, function
        self._worker: Any = workers[place % len(workers)]  # one may have left meanwhile
        self._iterator: Any = None
        self._runs = [0]
        """How often the last call has run: TensorFlow repeats it on a worker that was replaced."""
        self._fetched = 0
        """How often it had when its result was fetched."""
        self._call: Callable[[], Any] = list
        self._pending: Any = None

    def begin(self, position: int, *args: Any) -> None:
        """Requests the next call.

        Args:
            position: where in the data it begins: where the last one has ended.
            args: the function's other arguments.
        """
        before, fetched, self._runs = self._runs, self._fetched, [0]
        runs = self._runs

        def call() -> list[tf.Tensor]:
            runs[0] += 1
            if self._iterator is None or runs[0] > 1 or before[0] != fetched:
                self._iterator = self._open_at(position)
            results = self._function(self._iterator, *args)
            with tf.device(CHIEF_DEVICE):  # a worker that has returned may fail
                return [tf.identity(each) for each in results]

        self._call = call
        self._pending = self._worker.create_resource(call)

    def take(self) -> list[Any]:
        """Waits for the results of the call."""
        while True:
            try:
                results: list[Any] = self._pending.fetch()
            except tf.errors.CancelledError:
                if failure_of(self._pending) is not None:
                    raise  # the function itself was cancelled
                self._iterator, self._worker = None, live_worker(self._workers, self._worker, self._place)
                self._pending = self._worker.create_resource(self._call)
                continue
            self._fetched = self._runs[0]
            return results


def live_worker(workers: Workers, preferred: Any = None, place: int = 0) -> Any:
    """Waits until a worker runs; returns `preferred` if it does, else the one at `place` of those that do."""
    pause = threading.Event()
    while True:
        alive = [worker for worker in workers if not is_dead(worker)]
        if alive:
            return preferred if preferred in alive else alive[place % len(alive)]
        pause.wait(_POLL_SECONDS)  # TensorFlow has no event for a worker that is back


def raise_cause(error: Exception) -> NoReturn:
    """Raises the cause of a worker's error.

    Raises:
        TrainingError: its data ended early, or was made on the chief.
    """
    cause = getattr(error, "original_exception", None)
    if isinstance(error, tf.errors.OutOfRangeError):
        raise _ended_early(error) from error
    if isinstance(cause, tf.errors.OutOfRangeError):
        raise _ended_early(cause) from error
    if _DATASET_OF_CHIEF in str(cause or error):
        raise TrainingError(
            "the data function uses a dataset that was made outside of it, which workers cannot read",
            code="dataset-outside-function",
            hint="make the dataset inside the function, or pass the dataset itself instead of a function",
        ) from error
    if isinstance(cause, Exception):
        raise cause from None
    raise error


def _ended_early(error: Exception) -> TrainingError:
    found = re.search(r"/job:worker/(?:replica:\d+/)?task:(\d+)", str(error))
    return ended_early(f"worker:{found[1]}'s data" if found else "the data")
