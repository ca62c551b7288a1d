"""Asynchronous updates: each worker's gradients are applied when they are there, without waiting for the others.

A worker's execution pulls the parameters from the ps, computes gradients, and applies them where the variables live.
What has to be exact does not go through shared variables: metrics come back with the execution and are summed on the
chief; `iterations` is an atomic addition; seeds follow from the step's number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.base import Execution, Pause, WorkerReport
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext, raise_cause
from tfdist_cli.train.engine.parameter_server.transport import Pulled, dense
from tfdist_cli.train.engine.parameter_server.update_rules.local_steps import LocalSteps
from tfdist_cli.train.engine.step_timer import Watch
from tfdist_cli.train.model.embeddings import Lookup
from tfdist_cli.train.model.train_step import Tensors, values
from tfdist_cli.train.optimizers.apply import innermost, leaf_optimizers
from tfdist_cli.train.tf_compat.coordinator import error_of
from tfdist_cli.train.tf_compat.keras_optimizer import iterations

_AGAIN_SECONDS = 0.05


class AsynchronousUpdates:
    """Schedules executions of some steps to whichever worker is free.

    Args:
        workshop: the model on its cluster.
    """

    def __init__(self, workshop: ParameterServerContext) -> None:
        self._shop = workshop
        self._rule = workshop.rules.updates
        self._pace = Pacing(len(workshop.workers))
        self._functions: dict[int, Any] = {}
        self._local = self._own() if self._rule.local_steps > 1 else None

    @classmethod
    def check(cls, updates: Updates, optimizer: keras.optimizers.Optimizer, workers: int) -> None:
        """See `UpdateRule.check`."""
        steps = max(inner.gradient_accumulation_steps or 0 for inner in leaf_optimizers(optimizer))
        if steps and workers > 1:
            raise TrainingError(
                f"gradient_accumulation_steps is {steps}, but asynchronous workers cannot accumulate together",
                code="accumulation-needs-synchronous-workers",
                hint="use larger batches, updates: {push_every: N}, or strategy: multi_worker_mirrored",
            )
        scales = optimizer is not innermost(optimizer) or optimizer.loss_scale_factor is not None
        if updates.delay_compensation and scales:
            raise TrainingError(
                "delay_compensation needs unscaled gradients, but the optimizer scales the loss (mixed_float16)",
                code="loss-scaling-unsupported",
                hint="use the mixed_bfloat16 policy, or remove delay_compensation or loss_scale_factor",
            )

    @classmethod
    def batches_per_update(cls, updates: Updates, workers: int) -> int:  # noqa: ARG003 whatever they are
        """See `UpdateRule.batches_per_update`."""
        return updates.push_every

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `Engine.run`; what is in flight when a pause is agreed is finished and yielded."""
        left, start = steps, first
        pending: deque[tuple[int, int, Any]] = deque()
        self._pace.begin()
        while True:
            while left and len(pending) < self._pace.in_flight and not pause.agreed():
                count = self._count(self._pace.size(size) if adapts else size, left)
                pending.append((start, count, self._schedule(iterators, count, start)))
                left, start = left - count, start + count
            if not pending:
                return
            begun, count, remote = pending.popleft()
            execution = self._execution(
                begun, count, self._raising_cause(partial(_fetched, remote)), int(pause.wanted())
            )
            self._pace.done(len(execution.losses))
            yield execution

    def _own(self) -> LocalSteps:
        shop = self._shop
        step, tables = shop.step, shop.tables.parameter_indices
        return LocalSteps(step.model.optimizer, step.parameters, tables, shop.wire, shop.rate)

    def _rounds(self, count: int) -> list[int]:
        """So many steps by how many a worker takes between reading parameters and telling what came of them."""
        every = self._rule.steps_per_round
        return [min(every, count - begin) for begin in range(0, count, every)]

    def _count(self, wanted: int, left: int) -> int:
        """Steps in the next execution: whole updates as far as there are steps for them."""
        every = self._rule.steps_per_round
        wanted += -wanted % every
        return wanted if left >= wanted else min(every, left)

    def _schedule(self, iterators: Any, count: int, start: int) -> Any:
        function = self._functions.get(count)
        if function is None:
            function = self._functions[count] = self._execution_function(count)
        coordinator, args = self._shop.coordinator, (iterators, tf.constant(start, tf.int64))
        return self._raising_cause(lambda: coordinator.schedule(function, args=args))

    def _raising_cause(self, call: Callable[[], Any]) -> Any:
        """Calls; when an execution has failed, raises what it failed of, not what was cancelled along with it."""
        try:
            return call()
        except tf.errors.CancelledError:
            self._shop.coordinator.join()  # raises the failure that the others were cancelled for
            raise
        except Exception as error:  # noqa: BLE001 it is raised again, or its cause
            raise_cause(error)

    def _execution(self, first: int, count: int, counted: np.ndarray, votes: int) -> Execution:
        rounds = self._rounds(count)
        parts = np.split(counted, np.cumsum([count, self._shop.totals.size, len(rounds), 2]))
        losses, metrics, staleness, (examples, worker), phases = parts
        name = f"worker:{int(worker)}"
        if self._local:  # each of the round's steps is an update
            staleness = np.repeat(staleness, rounds)
        report = WorkerReport(float(np.sum(losses)), count, tuple(staleness.astype(int).tolist()))
        spent = {name: phases} if phases.size else {}
        return Execution(
            first, losses, metrics, {name: count}, {name: int(examples)}, votes, {name: report}, phases=spent
        )

    def _execution_function(self, count: int) -> Any:
        """`count` steps of one worker as one function, unrolled: a loop over several tasks' devices costs more."""
        shop, sizes = self._shop, self._rounds(count)
        exchange = self._update if self._local is None else partial(self._own_steps, self._local)

        @tf.function(autograph=False)
        def execute(iterator: Any, first: tf.Tensor) -> tf.Tensor:
            work = _Work(shop, iterator, first)
            staleness: Tensors = []
            load = work.fetch(sizes[0])
            for following in [*sizes[1:], 0]:
                number, made, ahead = exchange(work, load, following)
                with work.beside_count():
                    staleness.append(number - load.updates)
                    work.updates = number + made
                if following:
                    load = ahead or work.fetch(following)
            shop.assign_state(shop.own_state(work.state))
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            with work.beside_count():
                behind = tf.stack(staleness)
            counted = [tf.stack(work.losses), shop.totals.pack(work.metrics), behind]
            counted += [tf.stack([work.examples, tf.cast(worker, tf.int64)]), *work.watch.totals()]
            # As one tensor: each is fetched in a round of its own.
            return tf.concat([tf.cast(part, tf.float64) for part in counted], axis=0)

        return execute

    def _update(self, work: _Work, load: _Load, following: int) -> tuple[tf.Tensor, int, _Load | None]:
        """One update of the ps by a load's gradients.

        Args:
            work: the execution's.
            load: batches and parameters.
            following: batches of the next load; 0 where there is none.

        Returns:
            How many updates came before; how many have been made; and the next load, if it was to be fetched early.
        """
        shop, rule = self._shop, self._rule
        gradients = work.compute(load)
        ahead = work.fetch(following) if rule.prefetch and following else None
        arrival = shop.wire.push(gradients, load.pulled)
        work.watch.after("push", arrival.parcels)
        if rule.delay_compensation:
            arrival = shop.wire.compensated(arrival, load.pulled, rule.delay_compensation)
        with work.watch.over("update"):
            number = shop.apply(shop.wire.gradients([arrival]), [each is not None for each in gradients])
        return number, 1, ahead

    def _own_steps(self, local: LocalSteps, work: _Work, load: _Load, _following: int) -> tuple[tf.Tensor, int, None]:
        """The same by steps of the worker's own, each an update."""
        copy, made = local.copy(load.lookup, load.pulled), len(load.batches)
        work.arrived(load, copy.slots.values)
        local.steps(copy, work.gradients(load, copy.values), load.updates)
        work.watch.after("compute", copy.values())
        work.watch.crossed(lambda: local.sizes(load.lookup))
        arrived, add = local.join(copy)
        work.watch.after("push", arrived)
        with work.watch.over("update"):
            add()
            with work.beside_count(), tf.control_dependencies(arrived[:1]):
                number = work.counter.assign_add(made, read_value=True) - made
        return number, made, None


def _fetched(remote: Any) -> Any:
    """What an execution has returned.

    It is copied to the chief when it is fetched. A worker that goes between the two takes it along; TensorFlow then
    gives the execution to another worker, whose result is the one that is fetched. An execution that fails just while
    it is fetched gives None, and its error after that.
    """
    pause = threading.Event()
    while True:
        try:
            fetched = remote.fetch()
        except tf.errors.OpError:
            if error_of(remote) is not None:
                raise  # the execution itself has failed
            pause.wait(_AGAIN_SECONDS)  # nothing tells when it has been run again
        else:
            return remote.fetch() if fetched is None else fetched


@dataclass(frozen=True)
class _Load:
    """Batches, and the parameters that go with them.

    Args:
        batches: as many as make one update.
        lookup: what they look up.
        pulled: the parameters.
        updates: how many updates these had seen.
    """

    batches: list[Any]
    lookup: Lookup
    pulled: Pulled
    updates: tf.Tensor


class _Work:
    """What an execution carries from one step to the next."""

    def __init__(self, shop: ParameterServerContext, iterator: Any, first: tf.Tensor) -> None:
        self._shop = shop
        self._iterator = iterator
        self._first = first
        self._done = 0
        self.watch = Watch(shop.rules.phases)
        self.counter = iterations(innermost(shop.step.model.optimizer)).value
        self.updates = tf.convert_to_tensor(self.counter)
        self.state = values(shop.step.state)
        self.metrics = shop.totals.initial_values()
        self.losses: Tensors = []
        self.examples = tf.zeros([], tf.int64)

    def beside_count(self) -> AbstractContextManager[Any]:
        """Operations go where updates are counted: what follows from the count need not cross the network in each."""
        return tf.device(self.counter.device)

    def fetch(self, count: int) -> _Load:
        """The next batches, and the parameters as they are now."""
        batches = [next_batch(self._iterator) for _ in range(count)]
        lookup = self._shop.tables.lookup(batches)
        return _Load(batches, lookup, self._shop.wire.pull(lookup), self.updates)

    def arrived(self, load: _Load, *more: Any) -> None:
        """Notes that a load is there, and what has been fetched with it."""
        self.watch.after("data", load.batches)
        self.watch.after("pull", load.pulled.values, *more)

    def gradients(self, load: _Load, parameters: Callable[[], Tensors]) -> Iterator[list[Any]]:
        """Each batch's gradients.

        Args:
            load: the batches, and what they look up.
            parameters: tells the parameters that a batch's gradients are computed of.
        """
        for batch, positions in zip(load.batches, load.lookup.positions, strict=True):
            given = self._shop.tables.parameter_scope(positions)
            state = self._shop.seeds.state_for_step(self.state, self._first + self._done)
            result = self._shop.step.train(parameters(), state, self.metrics, batch, given)
            self.state, self.metrics = result.state, result.metrics
            self.losses.append(result.loss)
            self.examples += result.examples
            self._done += 1
            yield result.gradients

    def compute(self, load: _Load) -> list[Any]:
        """The mean of the batches' gradients."""
        self.arrived(load)
        gradients = list(self.gradients(load, lambda: load.pulled.values))
        mean = gradients[0] if len(gradients) == 1 else self._mean(gradients, load.pulled.values)
        self.watch.after("compute", mean)
        self.watch.crossed(lambda: self._shop.wire.sizes(load.lookup))
        return mean

    def _mean(self, gradients: list[list[Any]], parameters: Tensors) -> list[Any]:
        mean: list[Any] = []
        for parts, parameter in zip(zip(*gradients, strict=True), parameters, strict=True):
            if parts[0] is None:
                mean.append(None)
            else:
                with self._shop.step.device_scope():
                    whole = [dense(part, parameter) for part in parts]
                    mean.append(tf.add_n(whole) / tf.cast(len(whole), whole[0].dtype))
        return mean
