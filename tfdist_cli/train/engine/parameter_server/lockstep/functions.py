"""The functions of updates in lockstep, which workers and ps run without the chief.

A worker's function goes on from step to step. Another function applies updates of what workers commit, in the order of
sequence numbers. Both unroll the steps of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import tensorflow as tf

from tfdist_cli.train.data.divided import part
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.batches import BatchReader, ReadBatches
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.gradient_store import GradientStore, OnEachPs, StepNumbers
from tfdist_cli.train.engine.parameter_server.lockstep import data_position, token_queues
from tfdist_cli.train.engine.parameter_server.lockstep.step_updates import Operations, StepPart, WorkerParts
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN, Handles, Orders, TokenQueues
from tfdist_cli.train.engine.parameter_server.messages import Commit, LockstepState, StepKind, Token
from tfdist_cli.train.engine.step_timer import StepTimer, time_of
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import after, in_rows
from tfdist_cli.train.tf_compat.data import clock

_Carried = tuple[OnEachPs, Tensors]
"""What a worker carries from step to step: its `LockstepState` on each ps, and the last token that it has received
from each ps but the leader."""
_SINGLE_STEPS = 2
"""How many single steps a worker that restarts takes. After them it has received its last token from each ps, and not
looked it up, so that the next one in the queue is that of the next step."""
_END, _IN_CHUNK, _CHUNK = int(StepKind.END), int(StepKind.IN_CHUNK), int(StepKind.CHUNK)


class LockstepFunctions:
    """The functions.

    Args:
        context: the model on its cluster.
        divides: whether the examples of an update are divided among the workers.
        before: the functions of another number of workers: those that run on workers stay the same.

    Attributes:
        store: the stored gradients.
        parts: those of a step that makes its updates itself, each of which has a sequence number; [] for other steps.
        sequences: how many sequence numbers a step has.
        devices: the ps, the leader first.
        layout: how step reports are packed. If examples are divided, the seconds of the worker's step follow; and then
            an update's seconds, if measured.
        work: for a chunk's number of steps a worker's function. Its arguments: the iterator; the worker's number, the
            run's first sequence number, whether the iterator is this worker's alone, and
            `ParameterServerContext.counts` and `Orders.numbers`; `TokenQueues.of`.
        updates: for a chunk's number of updates the function that applies them until the end is ordered. Its
            arguments: `TokenQueues.handles`; the run's first sequence number.
        clear: drops the gradients that lost workers have stored and not committed.
    """

    reports_with_gradients: ClassVar[bool] = True
    """Whether a step report crosses to the leader behind the gradients of a bucket."""

    def __init__(
        self, context: ParameterServerContext, *, divides: bool = False, before: LockstepFunctions | None = None
    ) -> None:
        self._workers, self._most = context.worker_count, context.workers.most
        self._divides = divides
        self.store: GradientStore = (
            before.store.resized(context)
            if before
            else GradientStore(context, reports_to_leader=self.reports_with_gradients)
        )
        self.devices, self.layout = self.store.devices, self.store.layout
        self.parts: list[StepPart] = before.parts if before else self._step_parts(context)
        self.sequences = max(1, len(self.parts))
        self.work: Callable[[int], Any] = before.work if before else cache(self._worker_function)
        self.updates = cache(self._update_function)
        self.clear: Callable[[], None] = before.clear if before else tf.function(self._clear, autograph=False)

    def new_orders(self) -> Orders:
        """Returns what chief, ps and workers send each other in one or several runs."""
        return TokenQueues(self.devices, self._workers, self.layout.size, divides=self._divides)

    def begin(self) -> None:
        """Begins a run. No update may be under way: a rehearsal does not call this."""

    def _step_parts(self, context: ParameterServerContext) -> list[StepPart]:
        planned = context.step.updates if context.step.updates_within else ()
        return [StepPart(context, each, f"{self.store.name}-part{number}") for number, each in enumerate(planned)]

    def _clear(self) -> None:
        self.store.clear()
        for each in self.parts:
            each.clear()

    def _worker_function(self, size: int) -> Any:
        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:
            (worker, first, own_data), counts = tf.unstack(numbers[:3]), numbers[3:]
            leader = self.devices[0]

            def steps(count: int, packed: tf.Tensor, others: Tensors, *start: tf.Tensor) -> list[Any]:
                before: Tensors = []
                number = self._step_number(packed)
                carried = self.store.copied(packed), others
                reader = BatchReader(self.store.context, [1] * count, ahead=not self._divides)
                for index in range(count):
                    timer = StepTimer(self.store.measures_phases, *start)
                    own = StepNumbers(worker, number + index, counts)
                    token = self._tokens(carried)[leader]
                    read = reader.next_round(partial(self._read, iterator, worker, token, handles["bounds"]), before)
                    before, carried = self._step(read, own, carried, handles, timer, in_chunk=count > 1)
                    start = tuple(timer.last_time)
                    carried = self._next(carried, handles, in_chunk=index + 1 < count)
                states, others = carried
                with tf.device(leader):
                    packed = LockstepState(states[leader]).counted_down()
                return [tf.identity(packed), others, *start]

            def goes_on(packed: tf.Tensor, *_: Any) -> tf.Tensor:
                return LockstepState(packed).kind != _END

            def several(packed: tf.Tensor, *_: Any) -> tf.Tensor:
                state = LockstepState(packed)
                return tf.logical_and(state.kind == _CHUNK, state.single_steps == 0)

            packed, others = self._first(first, worker, handles)
            positioned = tf.logical_and(own_data > 0, goes_on(packed))
            packed = after(packed, [data_position.skip_to(iterator, self._step_number(packed), positioned)])
            start = [packed, others, *StepTimer(self.store.measures_phases).last_time]
            if size > 1:
                packed, *_ = in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                packed, *_ = tf.while_loop(goes_on, partial(steps, 1), start, parallel_iterations=1)
            data_position.advance_to(self._step_number(packed), positioned)
            return worker

        return work

    def _step_number(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns the number of the step of a packed `LockstepState`."""
        return LockstepState(packed).sequence % RUN // self.sequences

    def _first(self, first: tf.Tensor, worker: tf.Tensor, handles: Handles) -> tuple[tf.Tensor, Tensors]:
        """Waits until a worker's first step may begin on each ps.

        A worker that restarts within the run goes on where the leader is. It may have received the leader's last token
        before, or not, so it looks it up. Another ps may be one step further: a gradient for a sequence number whose
        update is being made is ignored. If the run is over, or there is another one by now, there is no step for it.
        A step that makes several updates begins anew: what it commits for those that were made is ignored.

        Returns:
            What it carries: its packed `LockstepState`, on itself, and the last token that it has received from each
            ps but the leader.
        """
        microseconds = tf.cast(clock() * 1e6, tf.int64)  # other than those of the worker's earlier functions
        leader, none_yet = self.devices[0], [-1, _IN_CHUNK]
        with tf.device(leader):
            restarts = token_queues.restarts(handles["started"][0], first)
            seen = Token(tf.where(restarts, token_queues.last_token(handles["last"][0]), none_yet))
            sequence = tf.maximum(seen.sequence, first)
            sequence -= sequence % RUN % self.sequences
            over = sequence // RUN != first // RUN
            kind = tf.where(over, tf.constant(_END, tf.int64), seen.kind)
            key = (microseconds + sequence % RUN) * self._most + worker
            single_steps = tf.where(restarts, tf.constant(_SINGLE_STEPS, tf.int64), 0)
            packed = LockstepState.pack(sequence, kind, key, single_steps)
            known = Token.pack(tf.where(over, sequence, seen.sequence), kind)
            token = token_queues.token_of(handles["tokens"][0], known, sequence)
            started = LockstepState(packed).received(Token(token))
        others = []
        for device, last, queue in list(zip(self.devices, handles["last"], handles["tokens"], strict=True))[1:]:
            with tf.device(device):
                state = LockstepState(tf.identity(packed))
                known = tf.where(state.single_steps > 0, token_queues.last_token(last), none_yet)
                known = tf.where(state.kind == _END, state.token.packed, known)
                others.append(token_queues.token_of(queue, known, state.sequence))
        return tf.identity(started), others

    def _next(self, carried: _Carried, handles: Handles, *, in_chunk: bool) -> _Carried:
        """Waits on each ps for the token of the next step; within a chunk it is the next one in the queue."""
        states, others = carried
        leader = self.devices[0]
        following = self.store.on_each_ps(lambda packed: LockstepState(packed).next(self._most), states)
        tokens = []
        for number, (device, queue) in enumerate(zip(self.devices, handles["tokens"], strict=True)):
            with tf.device(device):
                token = token_queues.next_token(queue) if in_chunk or device == leader else others[number - 1]
                if not in_chunk:
                    token = token_queues.token_of(queue, token, LockstepState(following[device]).sequence)
                tokens.append(token)
        with tf.device(leader):
            following[leader] = LockstepState(following[leader]).received(Token(tokens[0]))
        return following, tokens[1:]

    def _next_part(self, carried: _Carried, handles: Handles, *, in_chunk: bool) -> _Carried:
        """Like `_next`, for the next update of the same step. A worker that has restarted may look tokens up."""
        if in_chunk:
            return self._next(carried, handles, in_chunk=True)
        states, others = carried
        leader, queues = self.devices[0], zip(self.devices, handles["tokens"], handles["last"], strict=True)
        following = self.store.on_each_ps(lambda packed: LockstepState(packed).next(self._most), states)
        tokens = []
        for number, (device, queue, last) in enumerate(queues):
            with tf.device(device):
                state = LockstepState(following[device])
                received = others[number - 1] if number else LockstepState(states[leader]).token.packed
                begins = tf.equal(state.single_steps, _SINGLE_STEPS)
                known = tf.where(begins, token_queues.last_token(last), received)
                tokens.append(token_queues.token_of(queue, known, state.sequence))
        with tf.device(leader):
            following[leader] = LockstepState(following[leader]).received(Token(tokens[0]))
        return following, tokens[1:]

    def _step(
        self,
        read: ReadBatches,
        numbers: StepNumbers,
        carried: _Carried,
        handles: Handles,
        timer: StepTimer,
        *,
        in_chunk: bool,
    ) -> tuple[Tensors, _Carried]:
        """Takes a step with a batch.

        Returns:
            What the next batch is read after, and what the worker carries at the end of the step.
        """
        store, now = self.store, carried

        def together(operations: Operations) -> tuple[OnEachPs, OnEachPs]:
            nonlocal now
            with tf.device(self.devices[0]):
                nothing = tf.zeros([self.layout.size], tf.float64)
            self._commit(now, operations, nothing, handles)
            now = self._next_part(now, handles, in_chunk=in_chunk)
            return self._tokens(now), self._keys(now)

        tokens, keys = self._tokens(carried), self._keys(carried)
        within = [WorkerParts(self.parts, keys, together, timer)] if self.parts else []
        stored = store.store(read, numbers, tokens, keys, timer, *within)
        self._commit(now, stored.operations, stored.report, handles)
        return [stored.loss], now

    def _tokens(self, carried: _Carried) -> OnEachPs:
        states, others = carried
        return dict(zip(self.devices, [states[self.devices[0]], *others], strict=True))

    def _keys(self, carried: _Carried) -> OnEachPs:
        return self.store.on_each_ps(lambda packed: LockstepState(packed).key, carried[0])

    def _commit(self, carried: _Carried, stored: Operations, report: tf.Tensor, handles: Handles) -> None:
        """Commits what these operations have stored."""
        operations = [each for own in stored.values() for each in own]
        with tf.device(self.devices[0]):
            state = LockstepState(carried[0][self.devices[0]])
            time = _microseconds(time_of(operations)) if self._divides else tf.zeros([], tf.int64)
            head = after(Commit.pack(state.sequence, state.key, time), operations)
            token_queues.commit(handles["commits"][0], head, report)

    def _read(self, iterator: Any, worker: tf.Tensor, token: tf.Tensor, bounds: Tensors) -> Any:
        """Reads a worker's next batch, or its part of an update's examples."""
        batch = next_batch(iterator)
        for variable in bounds:
            with tf.device(self.devices[0]):
                begin, end = token_queues.bounds_of(variable, worker, token)
            batch = part(batch, begin, end)
        return batch

    def _update_function(self, size: int) -> Any:
        leader = self.devices[0]

        def chunk(handles: Handles, count: int, _: tf.Tensor, first: tf.Tensor, *begun: tf.Tensor) -> list[Any]:
            (following, bounds), reports = token_queues.next_order(handles), []
            done: dict[str, list[Any]] = {}
            for number in range(count):
                report, applied, done = self._updates_of_step(handles, first, number, begun)
                reports.append(report)
                is_last = number + 1 == count
                begun = self._begin(handles, applied, done, bounds if is_last else [])
                self._give_tokens(handles, applied, following if is_last else _IN_CHUNK, done)
            with tf.device(leader):
                result = after(tf.stack(reports), [each for own in done.values() for each in own])
            token_queues.send_results(handles, result)
            return [following, first + count * self.sequences, *begun]

        @tf.function(autograph=False)
        def updates(handles: Handles, first: tf.Tensor) -> None:
            kind, bounds = token_queues.next_order(handles)
            done: dict[str, list[Any]] = {}
            before = self.store.copied(first[None] - 1)
            begun = self._begin(handles, before, done, bounds)
            self._give_tokens(handles, before, kind, done)
            apply_as_ordered(size, partial(chunk, handles), [kind, first, *begun])

        return updates

    def _updates_of_step(
        self, handles: Handles, first: tf.Tensor, number: int, begun: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, OnEachPs, dict[str, list[Any]]]:
        """Applies the updates of a step, of which most have one.

        Args:
            handles: see `TokenQueues.handles`.
            first: the first sequence number of the chunk.
            number: the step's number in the chunk.
            begun: what `_begin` returned.

        Returns:
            The step reports, on the leader, shape (workers, numbers); the last sequence number and the keys behind it,
            on each ps; and what is available on each ps when it has made its part of the last update.
        """
        leader, spent, seconds = self.devices[0], [], []
        for place in range(self.sequences):
            with tf.device(leader):
                sequence = first + (number * self.sequences + place)
            commits, reports, applied, done, took = self._update(handles, sequence, place)
            with tf.device(leader):
                if not place:  # the times of later parts have waits for the other workers in them
                    spent = [tf.cast(commits.microseconds - start, tf.float64) / 1e6 for start in begun]
                seconds += took
            if place + 1 < self.sequences:
                self._give_tokens(handles, applied, _IN_CHUNK, done)
        with tf.device(leader):
            more = [each[:, None] for each in spent]
            more += [tf.fill([reports.shape[0], 1], tf.add_n(seconds))] if seconds else []
            return tf.concat([reports, *more], axis=1), applied, done

    def _update(
        self, handles: Handles, sequence: tf.Tensor, place: int
    ) -> tuple[Commit, tf.Tensor, OnEachPs, dict[str, list[Any]], list[tf.Tensor]]:
        """Applies an update of what all workers commit for a sequence number.

        Args:
            handles: see `TokenQueues.handles`.
            sequence: the sequence number.
            place: which update of its step it is.

        Returns:
            The commits; the reports; the sequence number and the keys behind it, on each ps; what is available on each
            ps when it has made its part of the update; and the seconds that the update took, if measured.
        """
        store, leader = self.store, self.devices[0]
        with tf.device(leader):
            commits, reports = token_queues.committed(handles["commits"], sequence, self.layout.size)
            weights = self.layout.examples_of(reports) if self._divides else tf.ones([reports.shape[0]], tf.float64)
            state = self.layout.mean_state(reports, weights) if place + 1 == self.sequences else None
            packed = tf.concat([sequence[None], commits.key], axis=0)
        applied = store.copied(packed)
        arrived = {device: store.time_of(device, own) for device, own in applied.items()}
        make = [self.parts[place].apply] if self.parts else []
        changed = store.apply(store.on_each_ps(lambda own: own[1:], applied), state, *make)
        # The numbers, too: a ps may have no part in the update.
        done = {device: [own, *store.on_device(device, changed)] for device, own in applied.items()}
        spans = []
        for device in self.devices:
            ended = store.time_of(device, done[device])
            spans += [now - then for now, then in zip(ended, arrived[device], strict=True)]
        with tf.device(leader):
            return commits, reports, applied, done, [tf.reduce_max(tf.stack(spans))] if spans else []

    def _begin(
        self, handles: Handles, applied: OnEachPs, done: dict[str, list[Any]], bounds: Tensors
    ) -> tuple[tf.Tensor, ...]:
        """Divides the examples of the next updates before their tokens are given, and takes the time.

        Args:
            handles: see `TokenQueues.handles`.
            applied: see `_give_tokens`.
            done: see `_give_tokens`; the leader's tokens have to wait for this as well.
            bounds: the division; empty if it stays the same.

        Returns:
            When the next step begins, in microseconds of the leader's clock, as the only element; nothing if examples
            are not divided.
        """
        if not self._divides:
            return ()
        leader = self.devices[0]
        with tf.device(leader):
            ready = [applied[leader], *done.get(leader, [])]
            with tf.control_dependencies(ready):
                ready = [token_queues.divide(handles["bounds"][0], value) for value in bounds] or ready
            begun = _microseconds(time_of(ready))
            done[leader] = [begun]
        return (begun,)

    def _give_tokens(
        self, handles: Handles, applied: OnEachPs, kind: tf.Tensor | int, done: dict[str, list[Any]]
    ) -> None:
        """Gives the tokens of the next sequence number on each ps, when its part of an update is made.

        Args:
            handles: see `TokenQueues.handles`.
            applied: the sequence number before, as the first number, on each ps.
            kind: the `StepKind` of the tokens.
            done: what is available on each ps when its part is made.
        """
        for number, (device, last) in enumerate(zip(self.devices, handles["last"], strict=True)):
            with tf.device(device):
                token = Token.pack(applied[device][0] + 1, tf.cast(kind, tf.int64))
                with tf.control_dependencies(done.get(device, [])):
                    token_queues.give_token(last, handles[f"tokens{number}"], token)


def apply_as_ordered(size: int, chunk: Callable[..., list[Any]], start: list[Any]) -> None:
    """Applies updates in a function until the end is ordered: those of a chunk unrolled, others one by one.

    Args:
        size: how many updates a chunk has.
        chunk: applies updates: how many, and the loop variables, of which the first is the `StepKind` of their order →
            the loop variables after them.
        start: the loop variables at the start.
    """

    def goes_on(kind: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return kind != _END

    def several(kind: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return kind == _CHUNK

    if size > 1:
        in_rows(goes_on, several, partial(chunk, size), partial(chunk, 1), start)
    else:
        tf.while_loop(goes_on, partial(chunk, 1), start, parallel_iterations=1)


def _microseconds(seconds: tf.Tensor) -> tf.Tensor:
    return tf.cast(seconds * 1e6, tf.int64)
