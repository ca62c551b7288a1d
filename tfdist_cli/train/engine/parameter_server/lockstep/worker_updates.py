"""Updates in lockstep that workers make themselves, in the memory of the ps: each of them updates a part of all values.

So no gradient is sent, the ps wait, and an update takes as long as a part of it. See `cluster/shared_memory/lockstep`.
It needs an optimizer that updates each value by itself. The variables of the ps have copies of the values before and
after a run. The chief allows steps, waits for them and reads their reports in the memory of the leader.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array, as_numbers
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.chief import NoMoreSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.step_operations import Places, Steps, runs_in_order
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES
from tfdist_cli.train.cluster.shared_memory.stored import close_unused, close_with
from tfdist_cli.train.cluster.shared_memory.tensors import opens_memory
from tfdist_cli.train.engine import part_updates
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.lockstep import data_position
from tfdist_cli.train.engine.parameter_server.lockstep.functions import LockstepFunctions
from tfdist_cli.train.engine.parameter_server.lockstep.shared_memory import suits as meets_in_memory
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN, Handles, Orders
from tfdist_cli.train.engine.parameter_server.lockstep.updating_worker import MOST_TOGETHER, UpdatingWorker, goes_on
from tfdist_cli.train.engine.parameter_server.messages import StepKind, Token
from tfdist_cli.train.engine.parameter_server.transport import Pulled
from tfdist_cli.train.engine.part_updates import PartUpdates, array_of
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.apply import StoredParameter, stored_parameters
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.tf_compat.distribute import ps_devices
from tfdist_cli.train.tf_compat.keras_optimizer import iterations
from tfdist_cli.train.variables.sharding import parts

log = logging.getLogger("tfdist")


def suits(context: ParameterServerContext) -> bool:
    """Whether a training can take this way: workers stay, and one function updates all values."""
    if not (meets_in_memory(context) and context.updates_divide):
        return False
    workers, transport = context.workers, context.transport
    if len(workers) != workers.most or context.rules.wire != "float32" or transport.terms:
        return False
    sizes = Counter[str]()
    for bucket in transport.buckets:
        sizes[bucket.device] += sum(shard.bytes for shard in bucket.dense)
    if not part_updates.are_worth_it(min(sizes.values()), context.worker_count):
        return False
    if not part_updates.suits(context.step, context.element_spec):
        return False
    return opens_memory(ps_devices(context.coordinator.strategy))  # this is the chief


class StepOrders(Orders):
    """The memory of a training, and the orders of the chief, which a thread of it executes.

    Args:
        steps: the operations.
        measures_phases: whether the phases of steps are measured.

    Attributes:
        kinds: the `StepKind` of each order.
        reports: of the steps of each order, see `Orders.received`.
    """

    def __init__(self, steps: Steps, *, measures_phases: bool = False) -> None:
        super().__init__()
        self._steps, self._measures_phases = steps, measures_phases
        self._ps: Any = None
        """The identities of all ps, once a run has started."""
        self._of_chief: Any = None
        """Their memory, likewise."""
        self._numbers: Sequence[int] = ()
        self.kinds: queue.SimpleQueue[StepKind] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    @property
    def handles(self) -> Any:
        """What `WorkerUpdateFunctions.updates` takes: the orders, and the identities of all ps."""
        return self, self._ps

    @property
    def numbers(self) -> Sequence[int]:
        """The identities of all ps."""
        return self._numbers

    def of(self, worker: int) -> Handles:  # noqa: ARG002 there is nothing but numbers
        """See `TokenQueues.of`."""
        return {}

    def start(self, sequence: int) -> None:  # noqa: ARG002 the memory serves all runs
        """See `TokenQueues.start`."""
        if self._ps is None:
            close_unused()
            self._ps = self._steps.opened()
            self._numbers = [number for own in self._ps.numpy() for number in as_numbers(own.tobytes())]
            self._of_chief = self._steps.of_chief(self._ps)
            close_with(self, partial(self._steps.abort, self._ps))

    def order(self, kind: StepKind, bounds: Sequence[int] = ()) -> None:  # noqa: ARG002 examples are not divided
        """See `Orders.order`."""
        self.kinds.put(kind)

    def report(self, first: int, count: int, allowed: int, *, ends: bool) -> None:
        """Waits for some steps, and sends their reports; see `ChiefSteps.collect` for the arguments.

        Raises:
            tf.errors.OpError: a ps is lost, or the run was aborted.
        """
        try:
            self.reports.put(self._of_chief.collect(first, count, allowed, ends=ends))
        except NoMoreSteps:
            self._steps.check(self._ps)
            raise

    def received(self) -> np.ndarray:
        """See `Orders.received`."""
        reports = self.reports.get()
        # Workers measure their updates themselves.
        return np.pad(reports, [(0, 0), (0, 0), (0, 1)]) if self._measures_phases and reports.size else reports

    def stop(self) -> None:
        """See `Orders.stop`."""
        self.reports.put(np.zeros([0]))

    def abort(self, times: int) -> None:  # noqa: ARG002 no worker takes a step before it looks
        """See `TokenQueues.abort`."""
        self._steps.abort(self._ps)

    def close_commits(self) -> None:
        """See `TokenQueues.close_commits`: `abort` has done so."""


class WorkerUpdateFunctions(LockstepFunctions):
    """The functions of such updates, see `LockstepFunctions`."""

    reports_with_gradients = False

    def __init__(self, context: ParameterServerContext) -> None:
        super().__init__(context)
        step = context.step
        self._stored = stored_parameters(step.optimizer, step.parameters)
        self._state = [parts(variable)[0] for variable in step.state]
        self._own = [self._on(device, [each.shards[0] for each in self._stored]) for device in self.devices]
        """The numbers of the parameters on each ps."""
        self._own_state = [self._on(device, self._state) for device in self.devices]
        """The numbers of its part of the model's state."""
        self._updates = PartUpdates(step, context.element_spec, self._stored, self._own, self._workers)
        layout = self._layout()
        self._steps, self._kept = Steps(self.devices, layout), layout.kept
        self._in_order = _run_in_order(context)
        self._executor_logged = False
        self._counter = iterations(step.optimizer).value
        self.clear = lambda: None  # nothing is stored

    @staticmethod
    def _on(device: str, variables: Sequence[Any]) -> list[int]:
        return [number for number, each in enumerate(variables) if each.device == device]

    def new_orders(self) -> Orders:
        """See `LockstepFunctions.new_orders`."""
        return StepOrders(self._steps, measures_phases=self.store.measures_phases)

    def _layout(self) -> StepLayout:
        updates = self._updates
        state = [[array_of(self._state[number]) for number in own] for own in self._own_state]
        place = {number: (ps, index) for ps, own in enumerate(self._own_state) for index, number in enumerate(own)}
        report = Array(np.dtype(np.float64), self.layout.size)
        return StepLayout(
            Layout(updates.arrays, state, report),
            updates.slots,
            self._workers,
            2 + self.layout.metrics,
            [place[number] for number in self.store.context.assigned],
            updates.factors,
        )

    def _variables(self, ps: int) -> list[Any]:
        """The variables on a ps: its parameters, their slots, and the state."""
        own = [self._stored[number] for number in self._own[ps]]
        slots = [slot for each in own for (slot,) in each.slots]
        return [*(each.shards[0] for each in own), *slots, *(self._state[number] for number in self._own_state[ps])]

    def _worker_function(self, size: int) -> Any:
        steps, store = self._steps, self.store
        several = min(size, MOST_TOGETHER, self._kept // 2) if self._in_order else 1

        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:  # noqa: ARG001 there are none
            worker, first, own_data = tf.unstack(numbers[:3])
            count = len(self.devices) * IDENTITY_BYTES // tf.int64.size
            identities = tf.bitcast(tf.reshape(numbers[-count:], [len(self.devices), -1]), tf.uint8)
            number = steps.join(worker, tf.reshape(identities, [len(self.devices), IDENTITY_BYTES]))
            numbers = numbers[:-count]
            token = steps.first_step(number, first)
            own = UpdatingWorker(self, iterator, numbers, number, steps.places(after(number, [token])))
            token = after(token, [own.replay(token)])
            positioned = tf.logical_and(own_data > 0, goes_on(token))
            token = after(token, [data_position.skip_to(iterator, self.step_number(token), positioned)])
            timer = StepTimer(store.measures_phases)
            timer.end("wait", token)
            token, *_ = own.steps([token, *timer.last_time, *timer.totals()], several)
            token = after(token, [own.leave(token)])
            data_position.advance_to(self.step_number(token), positioned)
            return worker

        return work

    def takes_default_executor(self, reason: str) -> None:
        """Logs once that TensorFlow's default executor runs the steps, though workers have one thread."""
        if not self._executor_logged:
            self._executor_logged = True
            log.info("TensorFlow's default executor runs the steps, not the single-threaded one: %s", reason)

    def step_number(self, token: tf.Tensor) -> tf.Tensor:
        """Returns the number of the step of a packed `Token`."""
        return Token(token).sequence % RUN

    def _update_function(self, size: int) -> Any:
        number = tf.TensorSpec([], tf.int64)
        identities = tf.TensorSpec([len(self.devices), IDENTITY_BYTES], tf.uint8)

        @cache
        def begin() -> Any:
            return tf.function(self._begin_run, autograph=False).get_concrete_function(identities, number, number)

        @cache
        def end() -> Any:
            return tf.function(self._end_run, autograph=False).get_concrete_function(identities, number)

        def updates(handles: tuple[StepOrders, tf.Tensor], first: tf.Tensor) -> None:
            orders, ps = handles
            kind, start = orders.kinds.get(), int(first)
            now = start + _steps_of(kind, size)
            begin()(ps, first, tf.constant(now, tf.int64))
            done, ends = start, kind == StepKind.END
            while not ends:
                following = orders.kinds.get()
                ends, allowed = following == StepKind.END, now + _steps_of(following, size)
                orders.report(done, now - done, allowed, ends=ends)
                done, now = now, allowed
            end()(ps, tf.constant(now - start, tf.int64))

        return updates

    def _begin_run(self, ps: tf.Tensor, first: tf.Tensor, allowed: tf.Tensor) -> None:
        with tf.device(self.devices[0]):
            count = self._counter.read_value()
        for number, device in enumerate(self.devices):
            with tf.device(device):
                self._steps.begin(ps[number], first, count, allowed, self._variables(number))

    def _end_run(self, ps: tf.Tensor, steps: tf.Tensor) -> None:
        with tf.device(self.devices[0]):
            self._counter.assign_add(steps, read_value=False)
        for number, device in enumerate(self.devices):
            with tf.device(device):
                self._steps.read(ps[number], self._variables(number))

    def local_parts(self, number: tf.Tensor, places: Sequence[Places]) -> list[StoredParameter]:
        """Returns a worker's parts of the parameters, see `PartUpdates.parts`."""
        return self._updates.parts(self._steps, number, places)

    def in_order(self, places: Sequence[Places]) -> tuple[Tensors, Tensors]:
        """Returns the parameters and the state of the places of all ps, in the order of the model's."""
        state: dict[int, tf.Tensor] = {}
        for own, own_state in zip(places, self._own_state, strict=True):
            state |= dict(zip(own_state, own.state, strict=True))
        shaped = [tf.reshape(state[number], each.shape) for number, each in enumerate(self._state)]
        return self._updates.values(places), shaped

    def sent(self, gradients: Sequence[Any], pulled: Pulled) -> Tensors:
        """What a worker sends of its gradients, see `PartUpdates.sent`."""
        whole = self.store.context.transport.whole_gradients(self._updates.summed(gradients), pulled)
        return self._updates.sent(gradients, [each and each[0] for each in whole])

    @property
    def count_of_factors(self) -> int:
        """How many gradients are sent as factors."""
        return len(self._updates.factors)

    @property
    def steps(self) -> Steps:
        """The operations."""
        return self._steps


def _run_in_order(context: ParameterServerContext) -> bool:
    """Whether all workers run the operations of steps one after another."""
    function = tf.function(runs_in_order, autograph=False)
    asked = [context.run_on_worker(worker, function) for worker in context.workers]
    try:
        return all(bool(answer.fetch()) for answer in asked)
    except tf.errors.OpError as error:
        log.debug("a worker is lost, so the default executor runs its steps: %s", error)
        return False


def _steps_of(kind: StepKind, size: int) -> int:
    """How many steps an order has."""
    return 0 if kind == StepKind.END else size if kind == StepKind.CHUNK else 1
