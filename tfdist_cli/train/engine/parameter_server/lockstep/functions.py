"""The functions of updates in lockstep, which workers and ps run without the chief.

A worker's function goes on from step to step. Another function applies updates of what workers commit, in the order of
sequence numbers. Both unroll the steps of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.data.divided import part
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.gradient_store import GradientStore, OnEachPs, StepNumbers
from tfdist_cli.train.engine.parameter_server.lockstep import token_queues
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN, Handles
from tfdist_cli.train.engine.parameter_server.messages import Commit, LockstepState, StepKind, Token
from tfdist_cli.train.engine.step_timer import StepTimer, time_of
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import after, in_rows

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
        devices: the ps, the leader first.
        layout: how step reports are packed. If examples are divided, the seconds of the worker's step follow; and then
            an update's seconds, if measured.
        work: for a chunk's number of steps a worker's function. Its arguments: the iterator; the worker's number, the
            run's first sequence number, and `ParameterServerContext.counts`; `TokenQueues.of`.
        updates: for a chunk's number of updates the function that applies them until the end is ordered. Its
            arguments: `TokenQueues.handles`; the run's first sequence number.
        clear: drops the gradients that lost workers have stored and not committed.
    """

    def __init__(
        self, context: ParameterServerContext, *, divides: bool = False, before: LockstepFunctions | None = None
    ) -> None:
        self._workers, self._most = context.worker_count, context.workers.most
        self._divides = divides
        self.store: GradientStore = (
            before.store.resized(context) if before else GradientStore(context, reports_to_leader=True)
        )
        self.devices, self.layout = self.store.devices, self.store.layout
        self.work: Callable[[int], Any] = before.work if before else cache(self._worker_function)
        self.updates = cache(self._update_function)
        self.clear: Callable[[], None] = before.clear if before else tf.function(self.store.clear, autograph=False)

    def _worker_function(self, size: int) -> Any:
        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:
            worker, first, *counts = tf.unstack(numbers)
            leader = self.devices[0]

            def steps(count: int, packed: tf.Tensor, others: Tensors, *start: tf.Tensor) -> list[Any]:
                before: Tensors = []
                number, carried = LockstepState(packed).sequence % RUN, (self.store.copied(packed), others)
                for index in range(count):
                    timer = StepTimer(self.store.measures_phases, *start)
                    own = StepNumbers(worker, number + index, counts)
                    before = self._step(iterator, own, carried, handles, before, timer)
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

            start = [*self._first(first, worker, handles), *StepTimer(self.store.measures_phases).last_time]
            if size > 1:
                in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                tf.while_loop(goes_on, partial(steps, 1), start, parallel_iterations=1)
            return worker

        return work

    def _first(self, first: tf.Tensor, worker: tf.Tensor, handles: Handles) -> tuple[tf.Tensor, Tensors]:
        """Waits until a worker's first step may begin on each ps.

        A worker that restarts within the run goes on where the leader is. It may have received the leader's last token
        before, or not, so it looks it up. Another ps may be one step further: a gradient for a sequence number whose
        update is being made is ignored. If the run is over, or there is another one by now, there is no step for it.

        Returns:
            What it carries: its packed `LockstepState`, on itself, and the last token that it has received from each
            ps but the leader.
        """
        microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)  # other than those of the worker's earlier functions
        leader, none_yet = self.devices[0], [-1, _IN_CHUNK]
        with tf.device(leader):
            restarts = token_queues.restarts(handles["started"][0], first)
            seen = Token(tf.where(restarts, token_queues.last_token(handles["last"][0]), none_yet))
            sequence = tf.maximum(seen.sequence, first)
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

    def _step(
        self,
        iterator: Any,
        numbers: StepNumbers,
        carried: _Carried,
        handles: Handles,
        before: Tensors,
        timer: StepTimer,
    ) -> Tensors:
        """Takes a step. Its batch is read after `before`; returns what the next batch is read after."""
        store, leader = self.store, self.devices[0]
        states, others = carried
        tokens = dict(zip(self.devices, [states[leader], *others], strict=True))
        keys = store.on_each_ps(lambda packed: LockstepState(packed).key, states)
        read = partial(self._read, iterator, numbers.worker, states[leader], handles["bounds"])
        stored = store.store(read, numbers, tokens, keys, before, timer)
        operations = [each for own in stored.operations.values() for each in own]
        with tf.device(leader):
            state = LockstepState(states[leader])
            time = _microseconds(time_of(operations)) if self._divides else tf.zeros([], tf.int64)
            head = after(Commit.pack(state.sequence, state.key, time), operations)
            token_queues.commit(handles["commits"][0], head, stored.report)
        return [stored.loss]

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

        def chunk(count: int, handles: Handles, _: tf.Tensor, first: tf.Tensor, *begun: tf.Tensor) -> list[Any]:
            (following, bounds), reports = token_queues.next_order(handles), []
            done: dict[str, list[Any]] = {}
            for number in range(count):
                with tf.device(leader):
                    sequence = first + number
                report, applied, done = self._update(handles, sequence, begun)
                reports.append(report)
                is_last = number + 1 == count
                begun = self._begin(handles, applied, done, bounds if is_last else [])
                self._give_tokens(handles, applied, following if is_last else _IN_CHUNK, done)
            with tf.device(leader):
                result = after(tf.stack(reports), [each for own in done.values() for each in own])
            token_queues.send_results(handles, result)
            return [following, first + count, *begun]

        def goes_on(kind: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return kind != _END

        def several(kind: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return kind == _CHUNK

        @tf.function(autograph=False)
        def updates(handles: Handles, first: tf.Tensor) -> None:
            kind, bounds = token_queues.next_order(handles)
            done: dict[str, list[Any]] = {}
            before = self.store.copied(first[None] - 1)
            begun = self._begin(handles, before, done, bounds)
            self._give_tokens(handles, before, kind, done)
            start = [kind, first, *begun]
            if size > 1:
                in_rows(goes_on, several, partial(chunk, size, handles), partial(chunk, 1, handles), start)
            else:
                tf.while_loop(goes_on, partial(chunk, 1, handles), start, parallel_iterations=1)

        return updates

    def _update(
        self, handles: Handles, sequence: tf.Tensor, begun: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, OnEachPs, dict[str, list[Any]]]:
        """Applies an update of what all workers commit for a sequence number.

        Args:
            handles: see `TokenQueues.handles`.
            sequence: the sequence number.
            begun: what `_begin` returned.

        Returns:
            The step reports, on the leader, shape (workers, numbers); the sequence number and the keys behind it, on
            each ps; and what is available on each ps when it has made its part of the update.
        """
        store, leader = self.store, self.devices[0]
        with tf.device(leader):
            commits, reports = token_queues.committed(handles["commits"], sequence, self.layout.size)
            weights = self.layout.examples_of(reports) if self._divides else tf.ones([reports.shape[0]], tf.float64)
            state = self.layout.mean_state(reports, weights)
            packed = tf.concat([sequence[None], commits.key], axis=0)
            for start in begun:
                spent = tf.cast(commits.microseconds - start, tf.float64) / 1e6
                reports = tf.concat([reports, spent[:, None]], axis=1)
        applied = store.copied(packed)
        arrived = {device: store.time_of(device, own) for device, own in applied.items()}
        changed = store.apply(store.on_each_ps(lambda own: own[1:], applied), state)
        # The numbers, too: a ps may have no part in the update.
        done = {device: [own, *store.on_device(device, changed)] for device, own in applied.items()}
        spans = []
        for device in self.devices:
            ended = store.time_of(device, done[device])
            spans += [now - then for now, then in zip(ended, arrived[device], strict=True)]
        with tf.device(leader):
            for seconds in [tf.reduce_max(tf.stack(spans))] if spans else []:
                reports = tf.concat([reports, tf.fill([reports.shape[0], 1], seconds)], axis=1)
        return reports, applied, done

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


def _microseconds(seconds: tf.Tensor) -> tf.Tensor:
    return tf.cast(seconds * 1e6, tf.int64)
