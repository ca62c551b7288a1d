"""Updates in lockstep of tasks that share memory: what a step needs crosses there, and no request is sent for it.

A worker's function and those of the ps meet in rounds, see `cluster/shared_memory/lockstep/rounds`: the sequence number
of a round is that of a step. So a worker's function has operations of its own task alone. The chief orders updates and
receives their reports as for other tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.round_operations import Rounds
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.batches import BatchReader
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.gradient_store import OnEachPs, StepNumbers
from tfdist_cli.train.engine.parameter_server.lockstep import data_position, token_queues
from tfdist_cli.train.engine.parameter_server.lockstep.functions import LockstepFunctions, apply_as_ordered
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN, Handles, Orders
from tfdist_cli.train.engine.parameter_server.messages import StepKind, Token
from tfdist_cli.train.engine.parameter_server.transport import Bucket, Pulled, PushedGradients
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.embeddings import Lookup
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.update_numbers import UpdateCounts
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.tf_compat.distribute import ps_devices
from tfdist_cli.train.variables.sharding import parts

_END, _IN_CHUNK = int(StepKind.END), int(StepKind.IN_CHUNK)


def suits(context: ParameterServerContext) -> bool:
    """Whether a training can take this way: all of its variables cross whole, and one update makes a step."""
    step, transport = context.step, context.transport
    if not (transport.shared and context.shares_memory) or transport.has_tables:
        return False
    if step.updates_within or step.examples_per_batch is not None or not transport.buckets:
        return False
    stored = [parts(variable) for variable in step.state]
    if not all(len(own) == 1 and own[0].shape.is_fully_defined() for own in stored):
        return False
    # A ps that has nothing but state that no step assigns takes no part in updates.
    taking_part = {bucket.device for bucket in transport.buckets} | {
        stored[index][0].device for index in context.assigned
    }
    devices = taking_part | {own[0].device for own in stored}
    return devices <= taking_part & set(ps_devices(context.coordinator.strategy))


class SharedOrders(Orders):
    """The boards of a run, and the queues between the chief and the leader.

    Args:
        rounds: the operations.
        workers: how many workers there are.
    """

    def __init__(self, rounds: Rounds, workers: int) -> None:
        super().__init__()
        self._rounds, self._workers = rounds, workers
        self._ps: Any = None
        """The identities of the boards of all ps, once the run has started."""

    @property
    def handles(self) -> Handles:
        """See `TokenQueues.handles`."""
        return {"ps": [self._ps], **self.of_chief, "bounds": []}

    def of(self, worker: int) -> Handles:  # noqa: ARG002 they are the same for each worker
        """See `TokenQueues.of`."""
        return {"ps": [self._ps]}

    def start(self, sequence: int) -> None:  # noqa: ARG002 a run has boards of its own
        """See `TokenQueues.start`."""
        self._ps = self._rounds.opened(tf.constant(self._workers))

    def abort(self, times: int) -> None:  # noqa: ARG002 no worker takes a token before it looks at it
        """See `TokenQueues.abort`."""
        self._rounds.aborted(self._ps)

    def close_commits(self) -> None:
        """See `TokenQueues.close_commits`: `abort` has done so."""


class SharedLockstepFunctions(LockstepFunctions):
    """The functions of tasks that share memory, see `LockstepFunctions`.

    Attributes:
        rounds: the operations with which they meet.
        counts: of the updates on each ps, if each makes its part of an update alone.
    """

    reports_with_gradients = False

    def __init__(self, context: ParameterServerContext, *, before: SharedLockstepFunctions | None = None) -> None:
        self.divide_state(context)
        super().__init__(context, before=before)
        self.rounds: Rounds = before.rounds if before else Rounds(self.devices, self._layout_of_boards())
        self.counts: UpdateCounts | None = before.counts if before else _counts(context)
        self.clear = lambda: None  # nothing is stored

    def divide_state(self, context: ParameterServerContext) -> None:
        """Divides the model's state into what steps assign and what stays as it is in a run."""
        self._state = [parts(variable)[0] for variable in context.step.state]
        self._changing = [part for index, part in enumerate(self._state) if index in context.assigned]
        self._fixed = [part for index, part in enumerate(self._state) if index not in context.assigned]

    def new_orders(self) -> Orders:
        """See `LockstepFunctions.new_orders`."""
        return SharedOrders(self.rounds, self._workers)

    def begin(self) -> None:
        """See `LockstepFunctions.begin`."""
        if self.counts is not None:
            self.counts.begin()

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return self.store.context.transport.buckets

    def _layout_of_boards(self) -> Layout:
        values: dict[str, list[Array]] = {device: [] for device in self.devices}
        gradients: dict[str, list[Array]] = {device: [] for device in self.devices}
        for bucket in self._buckets:
            dtype, shown, sent = self.store.context.transport.crossing(bucket)
            values[bucket.device].append(Array(np.dtype(dtype.as_numpy_dtype), shown))
            gradients[bucket.device].append(Array(np.dtype(dtype.as_numpy_dtype), sent))
        for part in (*self._changing, *self._fixed):
            values[part.device].append(Array(np.dtype(part.dtype.as_numpy_dtype), int(np.prod(part.shape))))
        return Layout(list(values.values()), list(gradients.values()), Array(np.dtype(np.float64), self.layout.size))

    def _shown(self, device: str, *, first: bool) -> Tensors:
        """What a ps shows the workers, called on it: its variables, then its part of the model's state.

        Args:
            device: the ps.
            first: whether it is for the first time in a run: then the state that no step assigns is shown, too.
        """
        shown = [self.store.context.transport.shown(bucket) for bucket in self._buckets if bucket.device == device]
        state = (*self._changing, *self._fixed) if first else self._changing
        return shown + [tf.convert_to_tensor(part) for part in state if part.device == device]

    def _seen(self, arrays: Sequence[tf.Tensor]) -> tuple[Pulled, Tensors]:
        """The parameters and the model's state on a worker, of what all ps show."""
        left, of_device = iter(arrays), {}
        for device in self.devices:
            count = sum(each.device == device for each in (*self._buckets, *self._state))
            of_device[device] = iter([next(left) for _ in range(count)])
        pulled = self.store.context.transport.seen([next(of_device[bucket.device]) for bucket in self._buckets])
        state = {id(part): next(of_device[part.device]) for part in (*self._changing, *self._fixed)}
        return pulled, [tf.reshape(state[id(part)], part.shape) for part in self._state]

    def _worker_function(self, size: int) -> Any:  # noqa: ARG002 a step of this task alone costs no less with others
        rounds, store = self.rounds, self.store

        def step(
            iterator: Any, numbers: tf.Tensor, joined: tf.Tensor, token: tf.Tensor, arrays: Tensors, *start: tf.Tensor
        ) -> list[Any]:
            worker, counts = numbers[0], numbers[3:]
            timer = StepTimer(store.measures_phases, *start)
            timer.end("wait", token)
            pulled, state = self._seen(arrays)
            timer.end("pull", pulled.values)
            read = BatchReader(store.context, [1], ahead=False).next_round(lambda: next_batch(iterator), [token])
            timer.end("data", read.batches)
            own = StepNumbers(worker, self._step_number(token), counts)
            result, report = store.train(read, own, pulled.values, state, [token])
            timer.end("compute", result.gradients)
            sent = self._sent(result.gradients, pulled)
            committed = self._commit_to_board(joined, token, sent, arrays, report, timer)
            following, arrays = rounds.await_round(joined, committed + 1)
            return [following, arrays, *timer.last_time]

        def goes_on(token: tf.Tensor, *_: Any) -> tf.Tensor:
            return Token(token).kind != _END

        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:
            worker, first, own_data = tf.unstack(numbers[:3])
            joined = rounds.join(worker, handles["ps"][0])
            token, arrays = rounds.await_round(joined, first)
            positioned = tf.logical_and(own_data > 0, goes_on(token))
            token = after(token, [data_position.skip_to(iterator, self._step_number(token), positioned)])
            start = [token, arrays, *StepTimer(store.measures_phases).last_time]
            token, *_ = tf.while_loop(goes_on, partial(step, iterator, numbers, joined), start, parallel_iterations=1)
            data_position.advance_to(self._step_number(token), positioned)
            return worker

        return work

    def _step_number(self, packed: tf.Tensor) -> tf.Tensor:
        return Token(packed).sequence % RUN

    def _sent(self, gradients: Sequence[Any], pulled: Pulled) -> Tensors:
        """A worker's gradients as they cross, those for the leader first."""
        packed = self.store.context.transport.packed_gradients(gradients, pulled)
        return [
            each
            for device in self.devices
            for each, bucket in zip(packed, self._buckets, strict=True)
            if bucket.device == device
        ]

    def _commit_to_board(
        self, joined: tf.Tensor, token: tf.Tensor, sent: Tensors, used: Tensors, report: tf.Tensor, timer: StepTimer
    ) -> tf.Tensor:
        """Writes gradients to a worker's board, and commits them; returns the sequence number, when it is done."""
        sequence = Token(token).sequence
        if self.store.measures_phases:
            written = self.rounds.write(joined, sequence, sent)
            timer.end("push", written)
            timer.add_bytes(lambda: self.store.context.transport.sizes(Lookup([], [])))
            report, sent = tf.concat([report, *timer.totals()], axis=0), []
        return self.rounds.commit(joined, sequence, report, sent, used)

    def _update_function(self, size: int) -> Any:
        leader = self.devices[0]

        def chunk(handles: Handles, count: int, _: tf.Tensor, *sequences: tf.Tensor) -> list[Any]:
            following, reports = token_queues.next_order(handles)[0], []
            with tf.device(leader):
                rates = self.store.copied(self.store.context.sent_rate()) if self.counts is not None else {}
            now = dict(zip(self.devices, sequences, strict=True))
            for number in range(count):
                kind = following if number + 1 == count else tf.constant(_IN_CHUNK, tf.int64)
                report, now = self._update_of_round(handles, now, kind, rates)
                reports.append(report)
            with tf.device(leader):
                result = after(tf.stack(reports), now.values())
            token_queues.send_results(handles, result)
            return [following, *now.values()]

        @tf.function(autograph=False)
        def updates(handles: Handles, first: tf.Tensor) -> None:
            kind, _ = token_queues.next_order(handles)
            begun, ready = [], []
            for number, device in enumerate(self.devices):
                with tf.device(device):
                    ready.append(self.rounds.begin(number, handles["ps"][0]))
            for number, device in enumerate(self.devices):
                with tf.device(device):  # a ps closes its board after the last round: all have to have opened it
                    begun.append(self._publish(number, handles, tf.identity(first), kind, ready, first=True))
            apply_as_ordered(size, partial(chunk, handles), [kind, *begun])

        return updates

    def _publish(
        self,
        number: int,
        handles: Handles,
        sequence: tf.Tensor,
        kind: tf.Tensor,
        done: list[Any],
        *,
        first: bool = False,
    ) -> Any:
        """Lets a round begin on a ps, called on it, when its part of the update before is made."""
        with tf.control_dependencies(done):
            shown = self._shown(self.devices[number], first=first)
        return self.rounds.publish(number, handles["ps"][0], after(sequence, done), kind, shown)  # it may show nothing

    def _update_of_round(
        self, handles: Handles, now: OnEachPs, kind: tf.Tensor, rates: OnEachPs
    ) -> tuple[tf.Tensor, OnEachPs]:
        """Makes the update of a round, and lets the next one begin.

        Args:
            handles: see `SharedOrders.handles`.
            now: the sequence number, on each ps.
            kind: that of the next token.
            rates: `ParameterServerContext.sent_rate`, on each ps, if each counts its own updates.

        Returns:
            The step reports, on the leader, with the seconds that the update took behind them, if measured; and the
            next sequence number on each ps, where it has begun.
        """
        store, leader = self.store, self.devices[0]
        gradients: dict[str, list[Tensors]] = {}
        collected_on, arrived, reports = {}, {}, None
        for number, device in enumerate(self.devices):
            with tf.device(device):
                own, collected = self.rounds.collect(number, handles["ps"][0], now[device], self._workers)
                collected_on[device], arrived[device] = own, store.time_of(device, own)
                # The update begins after its time is taken, and the workers go on after that of its end.
                gradients[device] = [[after(each, arrived[device]) for each in arrays] for arrays in collected]
                reports = after(own, arrived[device]) if reports is None else reports
        with tf.device(leader):
            state = self.layout.mean_state(reports, tf.ones([self._workers], tf.float64))
        keys = store.on_each_ps(lambda own: tf.fill([self._workers], own), now)
        make = partial(self._make_update, gradients, rates, collected_on)
        changed = store.apply(keys, state, make)
        following, spans = {}, []
        for number, device in enumerate(self.devices):
            done = [collected_on[device], *store.on_device(device, changed)]
            ended = store.time_of(device, [now[device], *done])
            spans += [end - begin for end, begin in zip(ended, arrived[device], strict=True)]
            with tf.device(device):
                following[device] = self._publish(number, handles, now[device] + 1, kind, [*done, *ended])
        with tf.device(leader):
            seconds = [tf.fill([self._workers, 1], tf.reduce_max(tf.stack(spans)))] if spans else []
            return tf.concat([reports, *seconds], axis=1), following

    def _make_update(self, gradients: dict[str, list[Tensors]], rates: OnEachPs, awaited: OnEachPs, *_: Any) -> None:
        if self.counts is None:
            self.store.apply_mean(self._pushed(gradients))
        else:
            self.store.apply_mean_alone(self._pushed(gradients), self.counts, rates, awaited)

    def _pushed(self, gradients: dict[str, list[Tensors]]) -> list[PushedGradients]:
        """The gradients of each worker, from the arrays on each ps."""
        pushed = []
        for worker in range(self._workers):
            left = {device: iter(own[worker]) for device, own in gradients.items()}
            pushed.append(self.store.context.transport.arrived([next(left[each.device]) for each in self._buckets]))
        return pushed


def _counts(context: ParameterServerContext) -> UpdateCounts | None:
    """Counts the updates on each ps, if each makes its part of an update alone."""
    stored = (part for variable in context.step.parameters for part in parts(variable))
    return UpdateCounts(context.step.optimizer, stored) if context.updates_divide else None
