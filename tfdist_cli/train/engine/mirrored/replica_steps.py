"""The steps of one replica: the parameters are read, the model computes gradients, and their sums become updates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.engine.mirrored.gradient_reduction import GradientReduction
from tfdist_cli.train.engine.step_timer import StepTimer, time_of
from tfdist_cli.train.engine.table_rows import TableRows
from tfdist_cli.train.model.assignments import Assigned
from tfdist_cli.train.model.jit import compiles
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng.counters import SeedCounters, numbers_after
from tfdist_cli.train.model.train_step import ModelStep, values
from tfdist_cli.train.optimizers.apply import (
    leaf_optimizers,
    mark_changes,
    substituted,
    takes_sums_of_terms,
)
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import fused
from tfdist_cli.train.optimizers.terms import SummedTerms, tensors_of
from tfdist_cli.train.optimizers.update_numbers import learning_rate_at
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.tf_compat.distribute import merges_at_once
from tfdist_cli.train.tf_compat.functions import copied
from tfdist_cli.train.tf_compat.keras_optimizer import LEARNING_RATE, iterations
from tfdist_cli.train.tf_compat.patching import original
from tfdist_cli.train.tf_compat.variables import Read


@dataclass(frozen=True)
class StepsTaken:
    """What a replica's steps have resulted in.

    Attributes:
        state: the values of the model's state.
        metrics: the values of the metrics' variables.
        losses: of each step, shape ().
        overflows: of each step, whether gradients exceed the range of the wire's type.
        seconds: of each step, if measured.
        examples: the examples of all steps.
        logs: see `StepResult`; of the last step.
    """

    state: list[tf.Tensor]
    metrics: list[tf.Tensor]
    losses: Sequence[tf.Tensor] = ()
    overflows: Sequence[tf.Tensor] = ()
    seconds: Sequence[tf.Tensor] = ()
    examples: tf.Tensor | int = 0
    logs: Sequence[tf.Tensor] = ()

    def __add__(self, later: StepsTaken) -> StepsTaken:
        return StepsTaken(
            later.state,
            later.metrics,
            (*self.losses, *later.losses),
            (*self.overflows, *later.overflows),
            (*self.seconds, *later.seconds),
            self.examples + later.examples,
            later.logs,
        )


class ReplicaSteps:
    """Takes the steps of a replica.

    Args:
        step: the model's pure functions.
        rules: how gradients become updates.
        collectives: the sums over all replicas.
        tables: the tables that steps read and update row by row.
        seeds: the model's seed counters.
    """

    def __init__(
        self, step: ModelStep, rules: Rules, collectives: Collectives, tables: TableRows, seeds: SeedCounters
    ) -> None:
        self._step, self._rules, self._tables, self._seeds = step, rules, tables, seeds
        self.collectives = collectives
        self.reduction = GradientReduction(collectives, rules, tables)
        self._rate = RateScaling(rules.learning_rate, collectives.replicas)

    def take(
        self,
        batches: Sequence[Any],
        numbers: tf.Tensor,
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        timer: StepTimer,
        bounds: Sequence[tf.Tensor],
    ) -> StepsTaken:
        """Takes a step with each batch, with its updates.

        Args:
            batches: the replica's batches.
            numbers: `SeedCounters.numbers` of the first step.
            state: the values of the model's state.
            metrics: the values of the metrics' variables.
            timer: measures the phases.
            bounds: where the replicas' examples begin in those of a step, if steps are timed for that; else empty.
        """
        step, context = self._step, tf.distribute.get_replica_context()
        summed = self._tables.summed() if self.collectives.replicas > 1 else ()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        taken = StepsTaken(state, metrics)
        for number, batch in enumerate(batches):
            timer.end("data", batch)
            state = self._seeds.state_for_step(taken.state, numbers_after(numbers, number), replica)
            (read,) = self._tables.read([batch])
            begun = [time_of(read.values, batch)] if bounds else []
            updates = _Updates(self, context, timer)
            result = step.train(
                read.values, state, taken.metrics, _used_after(batch, begun), read.scope, update=updates.update
            )
            result = replace(result, gradients=read.gradients(result.gradients, summed=summed))
            timer.end("compute", result.gradients)
            ended = [_time_of_one_number(result.gradients) for _ in begun]
            if not step.updates_within:
                updates.make(step.optimizer, _used_after(result.gradients, ended), step.parameters)
            seconds = [end - start for start, end in zip(begun, ended, strict=True)]
            taken += StepsTaken(
                result.state,
                result.metrics,
                [result.loss],
                [updates.overflow],
                seconds,
                result.examples,
                result.logs,
            )
        return taken

    def take_copies(
        self,
        batches: Sequence[Any],
        numbers: tf.Tensor,
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        timer: StepTimer,
        bounds: Sequence[tf.Tensor],
    ) -> StepsTaken:
        """`take` for two or more batches, where each step after the first one is a copy: a second step is traced once.

        The strategy has a single local replica, and neither `timer` nor `bounds` measures anything.
        """

        def one(batch: Any, own: tf.Tensor, state: Any, metrics: Any) -> Any:
            return vars(self.take([batch], own, state, metrics, StepTimer(on=False), ()))

        taken = self.take(batches[:1], numbers, state, metrics, timer, bounds)
        with merges_at_once():
            copy = copied(one, batches[1], numbers_after(numbers, 1), taken.state, taken.metrics)
        if copy is None:
            return taken + self.take(batches[1:], numbers_after(numbers, 1), taken.state, taken.metrics, timer, bounds)
        for number, batch in enumerate(batches[1:], 1):
            taken += StepsTaken(**copy(batch, numbers_after(numbers, number), taken.state, taken.metrics))
        return taken

    def compiled_by_xla(self) -> Any:
        """`take` with all operations of the steps and of their updates in one program of XLA."""

        def take(batches: Any, numbers: tf.Tensor, state: Any, metrics: Any) -> Any:
            return vars(self.take(batches, numbers, state, metrics, StepTimer(on=False), ()))

        return tf.function(take, jit_compile=True, autograph=False)

    def updates_compile(self, element_spec: Any, totals: MetricTotals) -> bool:
        """Whether XLA compiles steps together with their updates: those of one replica, which no all-reduce parts.

        It takes far longer to sum the gradients of the same row than TensorFlow's own operations.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            totals: the metrics.
        """
        fast = self.collectives.replicas == 1 and self._rules.optimized and not self._rules.phases
        if not (self._step.jit and fast) or self._step.lookups(element_spec):
            return False
        numbers, state = tf.TensorSpec([len(self._seeds.numbers(0))], tf.int64), self._step.state
        return compiles(self.compiled_by_xla(), [element_spec], numbers, state, totals.initial_values())

    def apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Updates the replica's own copies, with gradients that are the same on all replicas."""
        summed, given = self.collectives.replicas > 1, gradients
        terms: dict[int, tf.Tensor] = {}
        if self._rules.optimized and takes_sums_of_terms(optimizer):
            pairs = list(zip(variables, gradients, strict=True))
            terms = {id(variable): each.terms for variable, each in pairs if isinstance(each, SummedTerms)}
            given = [each.total if isinstance(each, SummedTerms) else each for each in gradients]
        else:
            given = [each.repeated() if isinstance(each, SummedTerms) else each for each in gradients]
        with ExitStack() as within:
            for inner in leaf_optimizers(optimizer):
                # Another local replica may have replaced the rate with the value that it has read.
                own = original(inner, LEARNING_RATE)
                number = tf.convert_to_tensor(iterations(inner).value)
                rate = learning_rate_at(own, number, self._rate, inner.gradient_accumulation_steps)
                within.enter_context(substituted(inner, {LEARNING_RATE: Read(rate)}))
                if not inner.gradient_accumulation_steps and self._rules.optimized:
                    within.enter_context(fused(inner, self._tables.variables, summed=summed, terms=terms))
            optimizer.apply(given, variables)
        mark_changes(optimizer, given, variables)


class _Updates:
    """Makes the updates of one step on one replica.

    Args:
        steps: the replica's steps.
        context: the replica's context.
        timer: measures the phases.

    Attributes:
        overflow: whether gradients exceed the range of the wire's type.
    """

    def __init__(self, steps: ReplicaSteps, context: Any, timer: StepTimer) -> None:
        self._steps, self._context, self._timer = steps, context, timer
        self._before: list[Any] = []
        self.overflow = tf.constant(False)

    def make(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Sums the gradients over all replicas, and makes an update."""
        # All replicas sum in the same order, although two updates of a step may not depend on each other.
        gradients = _used_after(gradients, self._before)
        summed, overflow = self._steps.reduction.summed(optimizer, gradients, variables, self._context, self._timer)
        self._before = tensors_of(summed)
        self.overflow |= overflow
        with self._timer.during("update"):
            self._steps.apply(optimizer, summed, variables)

    def update(
        self,
        optimizer: keras.optimizers.Optimizer | None,
        gradients: list[Any],
        variables: list[keras.Variable],
        assigned: Assigned,
    ) -> list[tf.Tensor]:
        """Makes an update within the step, see `assignments.Update`."""
        self._timer.end("compute", gradients, [value for _, value in assigned])
        if assigned:
            own, given = zip(*assigned, strict=True)
            self._before = self._steps.collectives.assign_means(own, given, self._context, self._before)
            self._timer.end("all_reduce", self._before)
        if optimizer is not None:
            self.make(optimizer, gradients, variables)
        return values(variables)


def _used_after(tensors: Any, times: list[tf.Tensor]) -> Any:
    """Lets tensors be used after a time was taken, if it was: an executor with one thread may take it at the end."""
    if not times:
        return tensors
    return tf.nest.map_structure(
        lambda tensor: None if tensor is None else after(tensor, times), tensors, expand_composites=True
    )


def _time_of_one_number(gradients: list[Any]) -> tf.Tensor:
    """The time when a number of each gradient is on the processor: an accelerator ends later than it seems to."""
    present = [getattr(each, "values", each) for each in gradients if each is not None]
    last = tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(each, [-1])[:1], tf.float32)) for each in present])
    with tf.device("CPU"):
        return time_of(tf.identity(last))
