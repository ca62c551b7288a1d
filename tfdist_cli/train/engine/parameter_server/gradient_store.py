"""Gradients that are stored on the ps until an update takes them.

A worker's gradient crosses to each ps in one piece and is stored there under a key. An update receives keys and applies
the mean of the gradients under them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.protocol.phases import COLUMNS
from tfdist_cli.train.engine.parameter_server.batches import ReadBatches
from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE, ParameterServerContext
from tfdist_cli.train.engine.parameter_server.messages import ReportLayout
from tfdist_cli.train.engine.parameter_server.transport import Piggyback, PushedGradients, Transport
from tfdist_cli.train.engine.step_timer import StepTimer, time_of
from tfdist_cli.train.model.assignments import Assigned, Optimizer, counters_read_after
from tfdist_cli.train.model.rng.counters import numbers_after
from tfdist_cli.train.model.train_step import StepResult, Tensors, values
from tfdist_cli.train.optimizers.apply import innermost
from tfdist_cli.train.optimizers.update_numbers import UpdateCounts
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.keras_optimizer import iterations
from tfdist_cli.train.variables.sharding import parts

_names = count()

OnEachPs = dict[str, tf.Tensor]
"""A tensor on each ps, by its device."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a worker's step.

    Args:
        worker: the worker's.
        step: the step's.
        counts: `ParameterServerContext.counts`.
    """

    worker: tf.Tensor
    step: tf.Tensor
    counts: tf.Tensor


@dataclass(frozen=True)
class StoredGradient:
    """A gradient that has been stored on the ps.

    Args:
        loss: of the batch.
        operations: for each ps those that stored it there.
        report: the packed `StepReport`, float64.
    """

    loss: tf.Tensor
    operations: dict[str, list[Any]]
    report: tf.Tensor


class Staging:
    """The place on the ps where the gradients of some variables are stored under keys.

    Args:
        transport: moves them.
        name: distinguishes the place.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self._buckets, self._name = transport.buckets, name

    def put(self, pushed: PushedGradients, keys: OnEachPs) -> dict[str, list[Any]]:
        """Stores a worker's gradients under a key; returns the operations on each ps."""
        stored: dict[str, list[Any]] = {}
        for index, (bucket, packed, rows) in enumerate(zip(self._buckets, pushed.packed, pushed.rows, strict=True)):
            dtypes, name = self._stored(index)
            with tf.device(bucket.device):
                tensors, indices = [packed, *rows], tf.range(1 + len(rows))
                staged = tf.raw_ops.MapStage(
                    key=keys[bucket.device], indices=indices, values=tensors, dtypes=dtypes, shared_name=name
                )
                stored.setdefault(bucket.device, []).append(unordered(staged))
        return stored

    def take(self, keys: OnEachPs) -> PushedGradients:
        """Takes the gradients that are stored under a key."""
        packed, rows = [], []
        for index, bucket in enumerate(self._buckets):
            dtypes, name = self._stored(index)
            with tf.device(bucket.device):
                key = keys[bucket.device]
                taken = tf.raw_ops.MapUnstage(key=key, indices=tf.range(len(dtypes)), dtypes=dtypes, shared_name=name)
                own, *own_rows = unordered(taken)
                packed.append(own)
                rows.append([tf.reshape(each, [-1]) for each in own_rows])
        return PushedGradients(packed, rows)

    def clear(self) -> None:
        """Drops all of them."""
        for index, bucket in enumerate(self._buckets):
            dtypes, name = self._stored(index)
            with tf.device(bucket.device):
                tf.raw_ops.MapClear(dtypes=dtypes, shared_name=name)

    def _stored(self, index: int) -> tuple[list[tf.DType], str]:
        """The types of what is stored for a bucket, and the name it is stored under."""
        bucket = self._buckets[index]
        return [bucket.dtype, *[tf.int32] * len(bucket.tables)], f"{self._name}-{index}"


class UpdatesWithin(Protocol):
    """Makes the updates of a step that makes them itself, see `WorkerParts`."""

    stored: dict[str, list[Any]]

    def begin(self, read: Tensors) -> None:
        """Begins the step with values that were read from the ps."""

    def update(
        self, optimizer: Optimizer | None, gradients: list[Any], variables: list[keras.Variable], assigned: Assigned
    ) -> Tensors:
        """Makes the next update."""

    def end(self) -> None:
        """Ends the step."""


class GradientStore:
    """Computes gradients, stores them on the ps, and applies them.

    Args:
        context: the model on its cluster.
        reports_to_leader: whether step reports are needed on the leader: then they cross with the gradients.

    Attributes:
        context: the model on its cluster.
        devices: the ps; first the leader, which counts updates.
        name: distinguishes the store.
        layout: how step reports are packed.
        measures_phases: whether the phases of steps are measured.
    """

    def __init__(self, context: ParameterServerContext, *, reports_to_leader: bool = False) -> None:
        self.context = context
        self.name = f"tfdist-{next(_names)}"
        self._staging = Staging(context.transport, self.name)
        self._present: list[bool] = []
        """Which parameters have a gradient; known when a worker's function has been traced, which happens first."""
        state = context.assigned_of(context.step.state)
        self._state_sizes = [int(np.prod(variable.shape)) for variable in state]
        devices = [bucket.device for bucket in context.transport.buckets]
        devices += [part.device for variable in state for part in parts(variable)]
        counter = iterations(innermost(context.step.optimizer)).value.device
        self.devices = sorted(dict.fromkeys(devices), key=lambda device: device != counter) or [CHIEF_DEVICE]
        self._piggyback_bucket = context.transport.piggyback_bucket(self.devices[0]) if reports_to_leader else None
        self.measures_phases = bool(context.rules.phases)
        phases = len(COLUMNS) if self.measures_phases else 0
        self.layout = ReportLayout(context.totals.size, sum(self._state_sizes), phases)

    def resized(self, context: ParameterServerContext) -> GradientStore:
        """Returns the same store, from which the updates of another number of workers take gradients."""
        store = copy(self)
        store.context = context
        return store

    def store(
        self,
        read: ReadBatches,
        numbers: StepNumbers,
        ready: OnEachPs,
        keys: OnEachPs,
        timer: StepTimer,
        within: UpdatesWithin | None = None,
    ) -> StoredGradient:
        """Computes a gradient of a batch and stores it on the ps.

        Args:
            read: the batch.
            numbers: the step's.
            ready: awaited before a ps's parameters are read.
            keys: the keys to store it under.
            timer: measures the phases.
            within: makes the updates of a step that makes them itself.
        """
        context = self.context
        timer.end("wait", ready)
        [batch], lookup = read.batches, read.lookup
        pulled = context.transport.pull(read.sent, after=ready)
        timer.end("data", batch)
        timer.end("pull", pulled.values)
        state, awaited = self._state(ready), list(ready.values())
        if within:
            within.begin(pulled.values)
            result, report = self.train(read, numbers, pulled.values, state, awaited, within.update)
            within.end()
            timer.end("compute", report)
            timer.add_bytes(lambda: context.transport.sizes(lookup, ahead=read.is_sent))
            return StoredGradient(result.loss, within.stored, tf.concat([report, *timer.totals()], axis=0))
        result, report = self.train(read, numbers, pulled.values, state, awaited)
        timer.end("compute", result.gradients)
        piggyback = None if self._piggyback_bucket is None else Piggyback(self._piggyback_bucket, report)
        pushed = context.transport.push(result.gradients, pulled, piggyback)
        stored = {**{device: [] for device in self.devices}, **self._staging.put(pushed, keys)}
        timer.end("push", stored)
        timer.add_bytes(lambda: context.transport.sizes(lookup, ahead=read.is_sent))
        if pushed.piggyback is None:
            return StoredGradient(result.loss, stored, tf.concat([report, *timer.totals()], axis=0))
        with tf.device(self.devices[0]):
            return StoredGradient(result.loss, stored, tf.concat([pushed.piggyback, *timer.totals()], axis=0))

    def train(
        self,
        read: ReadBatches,
        numbers: StepNumbers,
        parameters: Tensors,
        state: Tensors,
        ready: Tensors,
        update: Callable[..., Tensors] | None = None,
    ) -> tuple[StepResult, tf.Tensor]:
        """Trains a batch.

        Args:
            read: the batch.
            numbers: the step's.
            parameters: the values of the parameters, or the rows of tables.
            state: the values of the model's state.
            ready: awaited before variables of optimizers are read.
            update: makes the updates of a step that makes them itself.

        Returns:
            The result, and its report without phases.
        """
        context, batches, seeds = self.context, numbers.counts[0], numbers.counts[1:]
        divided = context.step.examples_per_batch is not None  # such workers stay as they are
        step = context.step if divided else context.step.for_updates_of(batches)
        state = context.seeds.state_for_step(state, numbers_after(seeds, numbers.step), numbers.worker)
        scope = context.tables.parameter_scope(read.lookup.positions[0])
        with counters_read_after(ready):
            result = step.train(parameters, state, context.totals.initial_values(), read.batches[0], scope, update)
        if update is None:
            self._present = [gradient is not None for gradient in result.gradients]
        return result, self._report(result)

    def _report(self, result: StepResult) -> tf.Tensor:
        """The packed report of a step, without its phases."""
        metrics = self.context.totals.pack(result.metrics, result.logs)
        return self.layout.pack(result.loss, result.examples, metrics, self.context.assigned_of(result.state))

    def apply(
        self,
        keys: OnEachPs,
        state: tf.Tensor | None,
        make: Callable[[ParameterServerContext, list[OnEachPs]], None] | None = None,
    ) -> list[tf.Operation]:
        """Applies the mean of stored gradients; returns the operations that change variables.

        Args:
            keys: their keys, int64, shape (gradients,).
            state: the model's new state, flat, float64; None if it stays.
            make: makes the update of gradients that are stored elsewhere, from the keys of each worker.
        """
        context = self.context
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        number = next(iter(keys.values())).shape[0]
        each = self.on_each_ps(tf.unstack, keys)
        by_worker = [{device: own[index] for device, own in each.items()} for index in range(number)]
        if make:
            make(context, by_worker)
        else:
            self.apply_mean([self.take(own) for own in by_worker])
        if state is not None:
            context.assign_state(tf.split(state, self._state_sizes) if self._state_sizes else [])
        made = graph.get_operations()[before:]
        return [each for each in made if any(part.dtype == tf.resource for part in each.inputs)]

    def apply_mean(self, pushed: Sequence[PushedGradients]) -> None:
        """Applies the mean of gradients on the ps."""
        context = self.context
        context.apply(context.transport.gradients(pushed, self._piggyback_bucket), self._present)

    def apply_mean_alone(
        self, pushed: Sequence[PushedGradients], counts: UpdateCounts, rates: OnEachPs, awaited: OnEachPs
    ) -> None:
        """Applies the mean of gradients; each ps makes its part without a message.

        Args:
            pushed: the gradients of each worker.
            counts: of the updates on each ps.
            rates: `ParameterServerContext.sent_rate`, on each ps.
            awaited: awaited before an update is counted.
        """
        context = self.context
        gradients = context.transport.gradients(pushed)
        for device in dict.fromkeys(bucket.device for bucket in context.transport.buckets):
            with tf.device(device), tf.control_dependencies([awaited[device]]):
                context.apply_on(device, gradients, self._present, counts, rates[device])

    def take(self, keys: OnEachPs) -> PushedGradients:
        """Takes the gradient that is stored under a key from the store."""
        return self._staging.take(keys)

    def clear(self) -> None:
        """Drops all stored gradients."""
        self._staging.clear()

    def on_device(self, device: str, operations: list[tf.Operation]) -> list[tf.Operation]:
        """The operations of an update that one ps may run: its own, and those that are bound to no ps."""
        return [each for each in operations if each.device == device or each.device not in self.devices]

    def copied(self, tensor: tf.Tensor) -> OnEachPs:
        """Copies a tensor to each ps."""
        return self.on_each_ps(tf.identity, dict.fromkeys(self.devices, tensor))

    def on_each_ps(self, function: Callable[[tf.Tensor], Any], tensors: OnEachPs) -> dict[str, Any]:
        """Calls a function on each ps with its tensor."""
        results = {}
        for device, tensor in tensors.items():
            with tf.device(device):
                results[device] = function(tensor)
        return results

    def time_of(self, device: str, results: Any) -> list[tf.Tensor]:
        """The time when some results are available on a ps; empty if phases are not measured."""
        with tf.device(device):
            return [time_of(results)] if self.measures_phases else []

    def _state(self, ready: OnEachPs) -> Tensors:
        """The model's state, read where it is."""
        state = []
        for variable in self.context.step.state:
            devices = {part.device for part in parts(variable)}
            with tf.control_dependencies([awaited for device, awaited in ready.items() if device in devices]):
                state += values([variable])
        return state
