"""The functions of synchronous updates in which all workers take part, which workers and ps run without the chief.

A worker's goes on from step to step; another one makes updates of what workers commit, in the order of their numbers.
Where rows of steps are ordered they stand in a row, in both.
"""

from __future__ import annotations

from functools import cache, partial
from operator import itemgetter
from typing import Any

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.update_rules import token_queues
from tfdist_cli.train.engine.parameter_server.update_rules.gradient_store import GradientStore, There
from tfdist_cli.train.engine.parameter_server.update_rules.token_queues import (
    END,
    PLACE,
    ROW,
    RUN,
    WHAT,
    WITHIN,
    Handles,
)
from tfdist_cli.train.engine.step_timer import Watch
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import after, in_rows

_KEY, _ALONE = 2, 3
"""What stands in a worker's state behind its place and what the leader's turn says: the key of its gradient, and how
many steps it takes alone."""
_Own = tuple[There, Tensors]
"""What a worker carries: its state on each ps, and the last turn that it has seen on each but the leader."""
_SURE = 2
"""A worker that begins anew takes so many steps alone: then it has received its last turn on each ps, and not looked it
up, so that the next one in the queue is the next step's."""


class LockstepFunctions:
    """The functions.

    Args:
        workshop: the model on its cluster.

    Attributes:
        devices: the ps, the leader first.
        sizes: the parts of what is counted, as `GradientStore` has them; then an update's seconds, if measured.
        work: for so many steps in a row a worker's function: its iterator; its number and the run's first place; what
            `TokenQueues.of` gives.
        updates: for so many updates in a row the function that makes them until the end is ordered:
            `TokenQueues.handles`; the run's first place.
    """

    def __init__(self, workshop: ParameterServerContext) -> None:
        self._shop = workshop
        self._staged = GradientStore(workshop, counts_first=True)
        self.devices, self.sizes = self._staged.devices, self._staged.sizes
        self.work = cache(self._worker_function)
        self.updates = cache(self._update_function)

    @tf.function(autograph=False)
    def forget(self) -> None:
        """Drops what lost workers have left and not committed."""
        self._staged.forget()

    def _worker_function(self, size: int) -> Any:
        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:
            worker, first = tf.unstack(numbers)
            leader = self.devices[0]

            def steps(count: int, state: tf.Tensor, others: Tensors, *note: tf.Tensor) -> list[Any]:
                before: Tensors = []
                number, own = state[PLACE] % RUN, (self._staged.there(state), others)
                for place in range(count):
                    watch = Watch(self._staged.watched, *note)
                    before = self._step(iterator, worker, number + place, own, handles, before, watch)
                    note = tuple(watch.note)
                    own = self._next(own, handles, within=place + 1 < count)
                there, others = own
                with tf.device(leader):
                    state = there[leader] - tf.stack([0, 0, 0, tf.minimum(there[leader][_ALONE], 1)])
                return [tf.identity(state), others, *note]

            def goes_on(state: tf.Tensor, *_: Any) -> tf.Tensor:
                return state[WHAT] != END

            def several(state: tf.Tensor, *_: Any) -> tf.Tensor:
                return tf.logical_and(state[WHAT] == ROW, state[_ALONE] == 0)

            start = [*self._first(first, worker, handles), *Watch(self._staged.watched).note]
            if size > 1:
                in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                tf.while_loop(goes_on, partial(steps, 1), start, parallel_iterations=1)
            return worker

        return work

    def _first(self, first: tf.Tensor, worker: tf.Tensor, handles: Handles) -> tuple[tf.Tensor, Tensors]:
        """Waits until a worker's first step may begin on each ps.

        A worker that begins the run anew goes on where the leader is. Its turn there may have been received before,
        or not, so it is looked up. Another ps may be ahead by one: what is computed for a place whose update is being
        made counts for nothing. When the run is over, or there is another one by now, there is no step for it.

        Returns:
            What it carries: its state, on itself, and the last turn that it has seen on each ps but the leader.
        """
        microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)  # another function of this worker began in others
        leader, workers = self.devices[0], len(self._shop.workers)
        with tf.device(leader):
            anew = token_queues.begins_anew(handles["begun"][0], first)
            seen = tf.where(anew, token_queues.last_turn(handles["last"][0]), [-1, WITHIN])
            place = tf.maximum(seen[PLACE], first)
            over = place // RUN != first // RUN
            what = tf.where(over, tf.constant(END, tf.int64), seen[WHAT])
            key = (microseconds + place % RUN) * workers + worker
            state = tf.stack([place, what, key, tf.where(anew, tf.constant(_SURE, tf.int64), 0)])
            turn = token_queues.turn_of(
                handles["turns"][0], tf.stack([tf.where(over, place, seen[PLACE]), what]), place
            )
            begun = _with_turn(state, turn)
        others = []
        for device, last, queue in list(zip(self.devices, handles["last"], handles["turns"], strict=True))[1:]:
            with tf.device(device):
                own = tf.identity(state)
                seen = tf.where(own[_ALONE] > 0, token_queues.last_turn(last), [-1, WITHIN])
                seen = tf.where(own[WHAT] == END, own[:2], seen)
                others.append(token_queues.turn_of(queue, seen, own[PLACE]))
        return tf.identity(begun), others

    def _next(self, own: _Own, handles: Handles, *, within: bool) -> _Own:
        """Waits on each ps for the turn of the next step; within a row it is the next one in the queue."""
        there, others = own
        leader = self.devices[0]
        further = self._staged.on_each(self._further, there)
        turns = []
        for number, (device, queue) in enumerate(zip(self.devices, handles["turns"], strict=True)):
            with tf.device(device):
                turn = token_queues.next_turn(queue) if within or device == leader else others[number - 1]
                turns.append(turn if within else token_queues.turn_of(queue, turn, further[device][PLACE]))
        with tf.device(leader):
            further[leader] = _with_turn(further[leader], turns[0])
        return further, turns[1:]

    def _further(self, state: tf.Tensor) -> tf.Tensor:
        """A worker's state at the next step, but for what its turn says."""
        return state + tf.constant([1, 0, len(self._shop.workers), 0], tf.int64)

    def _step(
        self,
        iterator: Any,
        worker: tf.Tensor,
        number: tf.Tensor,
        own: _Own,
        handles: Handles,
        before: Tensors,
        watch: Watch,
    ) -> Tensors:
        """A step. Its batch is read after `before`; returns what the next one's is."""
        staged, leader = self._staged, self.devices[0]
        there, others = own
        turns = dict(zip(self.devices, [there[leader], *others], strict=True))
        left = staged.leave(iterator, worker, number, turns, staged.on_each(itemgetter(_KEY), there), before, watch)
        with tf.device(leader):
            head = tf.stack([there[leader][PLACE], there[leader][_KEY]])
            head = after(head, [each for part in left.operations.values() for each in part])
            token_queues.commit(handles["commits"][0], head, left.counted)
        return [left.loss]

    def _update_function(self, size: int) -> Any:
        leader = self.devices[0]

        def row(count: int, handles: Handles, _: tf.Tensor, first: tf.Tensor) -> list[Any]:
            what, told = token_queues.next_order(handles), []
            done: dict[str, list[Any]] = {}
            for number in range(count):
                with tf.device(leader):
                    place = first + number
                counted, there, done = self._update(handles, place)
                told.append(counted)
                self._give(handles, there, what if number + 1 == count else WITHIN, done)
            with tf.device(leader):
                all_told = after(tf.stack(told), [each for own in done.values() for each in own])
            token_queues.tell(handles, all_told)
            return [what, first + count]

        def goes_on(what: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return what != END

        def several(what: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return what == ROW

        @tf.function(autograph=False)
        def updates(handles: Handles, first: tf.Tensor) -> None:
            what = token_queues.next_order(handles)
            self._give(handles, self._staged.there(first[None] - 1), what, {})
            start = [what, first]
            if size > 1:
                in_rows(goes_on, several, partial(row, size, handles), partial(row, 1, handles), start)
            else:
                tf.while_loop(goes_on, partial(row, 1, handles), start, parallel_iterations=1)

        return updates

    def _update(self, handles: Handles, place: tf.Tensor) -> tuple[tf.Tensor, There, dict[str, list[Any]]]:
        """Makes an update of what all workers commit for a place.

        Returns:
            What was counted, on the leader, shape (workers, numbers); the place, and the keys behind it, on each ps;
            and what has to be there on each when its part is done: this, too, as it may have none.
        """
        staged, leader = self._staged, self.devices[0]
        with tf.device(leader):
            keys, counted = token_queues.committed(handles["commits"], place, sum(self.sizes))
            begin = sum(self.sizes[:2])
            states = counted[:, begin : begin + staged.state_size]
            state = tf.reduce_mean(states, axis=0) if staged.state_size else tf.zeros([0], tf.float64)
            known = tf.concat([place[None], keys], axis=0)
        there = staged.there(known)
        begun = {device: staged.noted(device, own) for device, own in there.items()}
        changed = staged.update(staged.on_each(lambda own: own[1:], there), state)
        done = {device: [own, *staged.part(device, changed)] for device, own in there.items()}
        spans = []
        for device in self.devices:
            ended = staged.noted(device, done[device])
            spans += [now - then for now, then in zip(ended, begun[device], strict=True)]
        with tf.device(leader):
            for seconds in [tf.reduce_max(tf.stack(spans))] if spans else []:
                counted = tf.concat([counted, tf.fill([counted.shape[0], 1], seconds)], axis=1)
        return counted, there, done

    def _give(self, handles: Handles, there: There, what: tf.Tensor | int, done: dict[str, list[Any]]) -> None:
        """Gives the turns of the next place on each ps, when its part of an update is done.

        Args:
            handles: see `TokenQueues.handles`.
            there: the place before, as the first number, on each ps.
            what: what they say.
            done: what is there on each ps when its part is done.
        """
        for number, (device, last) in enumerate(zip(self.devices, handles["last"], strict=True)):
            with tf.device(device):
                turn = tf.stack([there[device][0] + 1, tf.cast(what, tf.int64)])
                with tf.control_dependencies(done.get(device, [])):
                    token_queues.give(last, handles[f"turns{number}"], turn)


def _with_turn(state: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
    """A worker's state as soon as the leader has given it a turn."""
    return tf.stack([state[PLACE], turn[WHAT], state[_KEY], state[_ALONE]])
