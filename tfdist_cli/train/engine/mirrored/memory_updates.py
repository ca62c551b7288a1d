"""The steps of mirrored workers of one host whose updates each of them makes a part of, in memory that they share.

The parameters and their slots are in the memory during a run of the engine. So gradients are not summed by each worker,
no update is made twice, and gradients that are products cross as their factors; see `cluster/shared_memory/lockstep`.
The variables have copies before and after the run. Each worker has one replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.step_operations import Steps, register
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import Watch
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES
from tfdist_cli.train.cluster.shared_memory.stored import close_unused, close_with
from tfdist_cli.train.engine import part_updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.engine.mirrored.replica_steps import StepsTaken
from tfdist_cli.train.engine.part_updates import PartUpdates, array_of
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.rng.counters import SeedCounters, numbers_after
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import StoredParameter, apply_on_device, stored_parameters
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.update_numbers import learning_rate_at
from tfdist_cli.train.tf_compat.control_flow import after, changes
from tfdist_cli.train.tf_compat.functions import copied
from tfdist_cli.train.tf_compat.keras_optimizer import iterations, learning_rate
from tfdist_cli.train.variables.changed_rows import marks_of
from tfdist_cli.train.variables.sharding import parts

_NO_REPORT = Array(np.dtype(np.float64), 0)
log = logging.getLogger("tfdist")


def suits(step: ModelStep, element_spec: Any, rules: Rules, collectives: Collectives) -> bool:
    """Whether a training can take this way, if its tasks share memory."""
    if collectives.local_all_reduce is None or not rules.optimized or rules.wire != "float32":
        return False
    if step.jit or step.updates_within or step.examples_per_batch is not None or step.lookups(element_spec):
        return False
    stored = [parts(variable) for variable in step.parameters]
    if any(len(own) > 1 or marks_of(own[0]) is not None for own in stored):
        return False
    size = sum(array_of(own).bytes for (own,) in stored)
    return part_updates.are_worth_it(size, collectives.workers) and part_updates.suits(step, element_spec)


class MemoryUpdates:
    """The steps of this task's replica, in memory of the first task. All tasks make one.

    Args:
        step: the model's pure functions.
        element_spec: the `tf.TypeSpec`s of a batch.
        rules: how gradients become updates.
        strategy: the strategy.
        collectives: the sums over all replicas.
        seeds: the model's seed counters.

    Attributes:
        shared: whether all tasks have opened the memory; otherwise it is of no use.
    """

    def __init__(
        self,
        step: ModelStep,
        element_spec: Any,
        rules: Rules,
        strategy: tf.distribute.Strategy,
        collectives: Collectives,
        seeds: SeedCounters,
    ) -> None:
        def local(variable: Any) -> Any:
            return strategy.experimental_local_results(variable)[0]

        stored = [
            StoredParameter(each.variable, [local(each.shards[0])], [[local(own)] for (own,) in each.slots])
            for each in stored_parameters(step.optimizer, step.parameters)
        ]
        self._counter = local(parts(iterations(step.optimizer))[0])
        slots = [own for each in stored for (own,) in each.slots]
        self._variables = [*(each.shards[0] for each in stored), *slots]
        updates = PartUpdates(step, element_spec, stored, [range(len(stored))], collectives.workers)
        arrays = Layout(updates.arrays, [[]], _NO_REPORT)
        self._steps = Steps(["CPU:0"], StepLayout(arrays, updates.slots, collectives.workers, 0, [], updates.factors))
        register()
        self._number = self._joined(collectives)
        self.shared = bool(self._number)
        rate = RateScaling(rules.learning_rate, collectives.replicas)
        self._replica = _Replica(step, seeds, collectives.first, rate, updates, self._steps, self._number)

    def _joined(self, collectives: Collectives) -> int:
        """The number of this replica, see `Steps.join_as_replica`; 0 if a task cannot open the memory."""
        close_unused()
        identity = np.zeros(IDENTITY_BYTES)
        if collectives.index == 0:
            try:
                memory = self._steps.opened()
            except tf.errors.OpError as error:
                log.debug("there is no memory for all variables: %s", error)
            else:
                close_with(self, partial(self._steps.abort, memory))
                identity += memory.numpy()[0]
        identity = collectives.total(identity).astype(np.uint8)
        try:
            number = self._steps.join_as_replica(collectives.first, identity.tobytes(), _watch(collectives))
        except OSError as error:
            log.debug("the tasks do not share their variables: %s", error)
            number = 0
        else:
            close_with(self, partial(self._steps.leave_as_replica, number))
        joined = collectives.total(np.array([float(number > 0)]))
        return number if joined[0] == collectives.workers else 0

    def begin(self) -> None:
        """Begins a run. All tasks have to call it, with variables of the same values."""
        self._begin()

    def end(self) -> None:
        """Ends a run: assigns the values to the variables."""
        self._end()

    @cached_property
    def _begin(self) -> Any:
        def begin() -> None:
            self._steps.enter(self._number, self._counter.read_value(), self._variables)

        return tf.function(begin, autograph=False).get_concrete_function()

    @cached_property
    def _end(self) -> Any:
        def end() -> None:
            self._steps.copy_to(self._number, self._variables)

        return tf.function(end, autograph=False).get_concrete_function()

    def take(
        self,
        batches: Sequence[Any],
        numbers: tf.Tensor,
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        timer: StepTimer,
        bounds: Sequence[tf.Tensor],  # noqa: ARG002 examples are not divided
    ) -> StepsTaken:
        """Takes a step with each batch, see `ReplicaSteps.take`."""
        run = _Execution(self._replica)
        taken, token = StepsTaken(state, metrics), run.token
        for number, batch in enumerate(batches):
            own = numbers_after(numbers, number)
            following, token = run.step(batch, own, taken.state, taken.metrics, token, timer)
            taken += following
        return self._counted(run, token, taken)

    def take_copies(
        self,
        batches: Sequence[Any],
        numbers: tf.Tensor,
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        timer: StepTimer,
        bounds: Sequence[tf.Tensor],  # noqa: ARG002 as above
    ) -> StepsTaken:
        """`take` for two or more batches where each step after the first one is a copy of the second one."""
        run = _Execution(self._replica)
        taken, token = run.step(batches[0], numbers, state, metrics, run.token, timer)
        copy = run.copied_step(batches[1], numbers_after(numbers, 1), taken, token)
        for number, batch in enumerate(batches[1:], 1):
            given = batch, numbers_after(numbers, number), taken.state, taken.metrics, token
            if copy:
                fields, token = copy(*given)
                taken += StepsTaken(**fields)
            else:
                following, token = run.step(*given, timer)
                taken += following
        return self._counted(run, token, taken)

    def _counted(self, run: _Execution, last: tf.Tensor, taken: StepsTaken) -> StepsTaken:
        """Counts the updates. The tasks sum what has resulted only after that: others may wait for their last step."""
        with tf.control_dependencies([run.leave(last)]):
            counted = self._counter.assign_add(len(taken.losses), read_value=False)
        return replace(taken, losses=[after(loss, [counted]) for loss in taken.losses])


@dataclass(frozen=True)
class _Replica:
    """What the steps of a replica need.

    Args:
        step: the model's pure functions.
        seeds: its seed counters.
        index: the replica's.
        rate: scales the learning rate.
        updates: of parts.
        steps: the operations.
        number: of the replica in these.
    """

    step: ModelStep
    seeds: SeedCounters
    index: int
    rate: RateScaling
    updates: PartUpdates
    steps: Steps
    number: int


class _Execution:
    """Some steps, in a function that is being traced.

    Args:
        replica: the replica.

    Attributes:
        token: of the first step.
    """

    def __init__(self, replica: _Replica) -> None:
        self._replica = replica
        self._number = tf.constant(replica.number, tf.int64)
        places = replica.steps.places(self._number)
        self._values = replica.updates.values(places)
        self._parts = replica.updates.parts(replica.steps, self._number, places)
        rate = learning_rate(replica.step.optimizer)
        self._own_rate: Any = rate
        if isinstance(rate, keras.Variable):
            read = tf.identity(tf.convert_to_tensor(rate.value))
            self._own_rate = lambda: read
        self.token = replica.steps.token(self._number)

    def step(
        self,
        batch: Any,
        numbers: tf.Tensor,
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        token: tf.Tensor,
        timer: StepTimer,
    ) -> tuple[StepsTaken, tf.Tensor]:
        """Takes a step; returns what it has resulted in, and the token of the next one."""
        replica, steps = self._replica, self._replica.steps
        timer.end("data", batch)
        with changes() as made:
            values = [after(each, [token]) for each in self._values]
            state = replica.seeds.state_for_step(state, numbers, tf.constant(replica.index, tf.int64))
            result = replica.step.train(values, state, metrics, batch)
            summed = replica.updates.summed(result.gradients)
            whole = [None if each is None else tf.convert_to_tensor(each) for each in summed]
            sent = replica.updates.sent(result.gradients, whole)
            timer.end("compute", sent)
        # Whatever uses the values where they are has to have done so.
        used = [*made, result.loss, *result.state, *result.metrics, *result.logs]
        report = after(tf.zeros([_NO_REPORT.size], tf.float64), used)
        count, means = steps.meet(self._number, token[0], report, sent)
        timer.end("all_reduce", means)
        timer.add_bytes(lambda: {"reduced": sum(each.shape.num_elements() * each.dtype.size for each in sent)})
        with changes() as updated, tf.control_dependencies([count]):
            rate = learning_rate_at(self._own_rate, count, replica.rate)
            apply_on_device(replica.step.optimizer, [[each] for each in means], self._parts, (rate, count))
        timer.end("update", updated)
        token = steps.finish(self._number, after(token[0], [count, *updated]))
        timer.end("all_reduce", token)
        taken = StepsTaken(
            result.state, result.metrics, [result.loss], [tf.constant(False)], [], result.examples, result.logs
        )
        return taken, token

    def leave(self, last: tf.Tensor) -> tf.Tensor:
        """Checks after the last token that the parts are still in the memory; returns what is awaited for that."""
        with tf.control_dependencies([last]):
            parts = [each for part in self._parts for each in (*part.shards, *(own for (own,) in part.slots))]
            values = [each.read_value() for each in parts]
        return self._replica.steps.leave(after(self._number, [last]), values)

    def copied_step(self, batch: Any, numbers: tf.Tensor, before: StepsTaken, token: tf.Tensor) -> Any:
        """Returns a function that adds copies of a step, see `functions.copied`."""

        def one(batch: Any, numbers: tf.Tensor, state: Any, metrics: Any, token: tf.Tensor) -> Any:
            awaited = tf.identity(token)  # a copy cannot wait for an argument itself
            taken, following = self.step(batch, numbers, state, metrics, awaited, StepTimer(on=False))
            return vars(taken), following

        return copied(one, batch, numbers, before.state, before.metrics, token)


def _watch(collectives: Collectives) -> Watch:
    """Looks whether the other tasks are there; raises an error that names one that is not."""
    all_reduce = collectives.local_all_reduce

    def look(unanswered: dict[int, float], waits: Callable[[], bool]) -> bool:
        if all_reduce:
            all_reduce.look(unanswered, waits)
        return False

    return look
