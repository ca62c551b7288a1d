"""The functions of synchronous updates in which all workers take part, which workers and ps run without the chief.

A worker's goes on from step to step; another one makes updates of what workers commit, in the order of their numbers.
Where rows of steps are ordered they stand in a row, in both.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train import turnstile
from tfdist_cli.train.flow import in_rows
from tfdist_cli.train.order import after
from tfdist_cli.train.phases import Watch
from tfdist_cli.train.staged import Staged
from tfdist_cli.train.step import Tensors
from tfdist_cli.train.turnstile import END, PLACE, ROW, RUN, WHAT, WITHIN, Handles
from tfdist_cli.train.workshop import Workshop

_OWN, _BASE, _ALONE = range(2, 5)
"""What a worker carries on each ps beside the last turn that it has seen there: the place of its own step, what it adds
to it for a key, and how many steps it takes alone before it may take a row."""
_SURE = 2
"""A worker that begins anew takes so many steps alone: then it has received its last turn on each ps, and not looked it
up, so that the next one in the queue is the next step's."""


class Cadence:
    """The functions.

    Args:
        workshop: the model on its cluster.

    Attributes:
        devices: the ps, the leader first.
        sizes: the parts of what is counted, as `Staged` has them; where time is taken, an update's own seconds follow.
        work: for so many steps in a row a worker's function: its iterator; its number and the run's first place; what
            `Turnstile.of` gives.
        updates: for so many updates in a row the function that makes them until the end is ordered:
            `Turnstile.handles`; the run's first place.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._shop = workshop
        self._staged = Staged(workshop)
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

            def steps(count: int, own: list[tf.Tensor], number: tf.Tensor, *note: tf.Tensor) -> list[Any]:
                before: Tensors = []
                for place in range(count):
                    watch = Watch(self._staged.watched, *note)
                    before = self._step(iterator, worker, number, own, handles, before, watch)
                    note, number = tuple(watch.note), number + 1
                    own = self._next(own, handles, within=place + 1 < count)
                return [own, number, *note]

            def goes_on(own: list[tf.Tensor], *_: tf.Tensor) -> tf.Tensor:
                return own[0][WHAT] != END

            def several(own: list[tf.Tensor], *_: tf.Tensor) -> tf.Tensor:
                return tf.logical_and(own[0][WHAT] == ROW, own[0][_ALONE] == 0)

            own = self._first(first, worker, handles)
            start = [own, own[0][_OWN] % RUN, *Watch(self._staged.watched).note]
            if size > 1:
                in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                tf.while_loop(goes_on, partial(steps, 1), start, parallel_iterations=1)
            return worker

        return work

    def _first(self, first: tf.Tensor, worker: tf.Tensor, handles: Handles) -> list[tf.Tensor]:
        """Waits until a worker's first step may begin on each ps; what it carries there.

        A worker that begins the run anew goes on where the leader is. Its turn there may have been received before,
        or not, so it is looked up. Another ps may be ahead by one: what is computed for a place whose update is being
        made counts for nothing. When the run is over, or there is another one by now, there is no step for it.
        """
        microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)  # another function of this worker began in others
        base = microseconds * len(self._shop.workers) + worker
        with tf.device(self.devices[0]):
            anew = turnstile.begins_anew(handles["begun"][0], first)
            there = turnstile.last_turn(handles["last"][0])
            place = tf.where(anew, tf.maximum(there[PLACE], first), first)
            over = tf.logical_and(anew, place // RUN != first // RUN)
        carried = []
        for device, last, queue in zip(self.devices, handles["last"], handles["turns"], strict=True):
            with tf.device(device):
                known = tf.where(anew, turnstile.last_turn(last), [-1, END])
                known = tf.where(over, tf.stack([place, END]), known)
                turn = turnstile.turn_of(queue, known, place)
                alone = tf.where(anew, tf.constant(_SURE, tf.int64), 0)
                carried.append(tf.stack([turn[PLACE], turn[WHAT], place, base, alone]))
        return carried

    def _next(self, own: list[tf.Tensor], handles: Handles, *, within: bool) -> list[tf.Tensor]:
        """Waits on each ps for the turn of the next step; within a row it is the next one in the queue."""
        carried = []
        for device, before, queue in zip(self.devices, own, handles["turns"], strict=True):
            with tf.device(device):
                place = before[_OWN] + 1
                turn = turnstile.next_turn(queue) if within else turnstile.turn_of(queue, before[:2], place)
                alone = tf.maximum(before[_ALONE] - 1, 0)
                carried.append(tf.stack([turn[PLACE], turn[WHAT], place, before[_BASE], alone]))
        return carried

    def _step(
        self,
        iterator: Any,
        worker: tf.Tensor,
        number: tf.Tensor,
        own: list[tf.Tensor],
        handles: Handles,
        before: Tensors,
        watch: Watch,
    ) -> Tensors:
        """A step. Its batch is read after `before`; returns what the next one's is."""
        staged = self._staged
        there = dict(zip(self.devices, own, strict=True))
        workers = len(self._shop.workers)
        keys = staged.on_each(lambda carried: carried[_BASE] + carried[_OWN] % RUN * workers, there)
        left = staged.leave(iterator, worker, number, there, keys, before, watch)
        leader = self.devices[0]
        with tf.device(leader):
            head = tf.stack([own[0][_OWN], keys[leader]])
            head = after(head, [each for own in left.operations.values() for each in own])
            turnstile.commit(handles["commits"][0], head, left.counted)
        return [left.loss]

    def _update_function(self, size: int) -> Any:
        leader = self.devices[0]

        def row(count: int, handles: Handles, _: tf.Tensor, places: list[tf.Tensor]) -> list[Any]:
            what, told = turnstile.next_order(handles), []
            done: dict[str, list[Any]] = {}
            for number in range(count):
                counted, done = self._update(handles, places[0])
                told.append(counted)
                following = what if number + 1 == count else tf.constant(WITHIN, tf.int64)
                places = self._give(handles, places, following, done)
            with tf.device(leader):
                all_told = tf.stack(told)
            with tf.control_dependencies([each for own in done.values() for each in own]):
                turnstile.tell(handles, all_told)
            return [what, places]

        def goes_on(what: tf.Tensor, _: list[tf.Tensor]) -> tf.Tensor:
            return what != END

        def several(what: tf.Tensor, _: list[tf.Tensor]) -> tf.Tensor:
            return what == ROW

        @tf.function(autograph=False)
        def updates(handles: Handles, first: tf.Tensor) -> None:
            what = turnstile.next_order(handles)
            places = [there - 1 for there in self._staged.there(first).values()]
            start = [what, self._give(handles, places, what, {})]
            if size > 1:
                in_rows(goes_on, several, partial(row, size, handles), partial(row, 1, handles), start)
            else:
                tf.while_loop(goes_on, partial(row, 1, handles), start, parallel_iterations=1)

        return updates

    def _update(self, handles: Handles, place: tf.Tensor) -> tuple[tf.Tensor, dict[str, list[Any]]]:
        """Makes an update of what all workers commit for a place.

        Returns:
            What was counted, on the leader, shape (workers, numbers), and what has to be there on each ps when its
            part is done: the keys, too, as it may have none.
        """
        staged, leader = self._staged, self.devices[0]
        size = sum(self.sizes)
        with tf.device(leader):
            taken = [turnstile.committed(queue, place, size) for queue in handles["commits"]]
            keys = tf.stack([key for key, _ in taken])
            counted = tf.stack([numbers for _, numbers in taken])
            _, _, states, _ = tf.split(counted, self.sizes, axis=1)
            state = tf.reduce_mean(states, axis=0)
        there = staged.there(keys)
        begun = {device: staged.noted(device, own) for device, own in there.items()}
        changed = staged.update(there, state)
        done = {device: [own, *staged.part(device, changed)] for device, own in there.items()}
        spans = []
        for device in self.devices:
            ended = staged.noted(device, done[device])
            spans += [now - then for now, then in zip(ended, begun[device], strict=True)]
        with tf.device(leader):
            for seconds in [tf.reduce_max(tf.stack(spans))] if spans else []:
                counted = tf.concat([counted, tf.fill([len(taken), 1], seconds)], axis=1)
        return counted, done

    def _give(
        self, handles: Handles, places: list[tf.Tensor], what: tf.Tensor, done: dict[str, list[Any]]
    ) -> list[tf.Tensor]:
        """Gives the turns that follow these places, on each ps when its part of an update is done; their places."""
        following = []
        for number, device in enumerate(self.devices):
            with tf.device(device):
                place = places[number] + 1
                turn = tf.stack([place, tf.identity(what)])
                with tf.control_dependencies(done.get(device, [])):
                    turnstile.give(handles["last"][number], handles[f"turns{number}"], turn)
            following.append(place)
        return following
