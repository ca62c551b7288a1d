"""The functions of synchronous updates in which all workers take part, which workers and ps run without the chief.

A worker's goes on from step to step; another one makes updates of what workers commit, in the order of their numbers.
Where rows of steps are ordered they stand in a row, in both.
"""

from __future__ import annotations

from functools import cache, partial
from operator import itemgetter
from typing import Any

import tensorflow as tf

from tfdist_cli.train import turnstile
from tfdist_cli.train.flow import in_rows
from tfdist_cli.train.order import after
from tfdist_cli.train.phases import Watch
from tfdist_cli.train.staged import Staged
from tfdist_cli.train.step import Tensors
from tfdist_cli.train.turnstile import END, KEY, PLACE, ROW, RUN, WHAT, WITHIN, Handles
from tfdist_cli.train.workshop import Workshop

_Own = list[tf.Tensor]
"""What a worker carries on one ps: the last turn that it has seen there, and the head of its step's commit."""
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
        self._staged = Staged(workshop, counts_first=True)
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

            def steps(count: int, own: list[_Own], alone: tf.Tensor, number: tf.Tensor, *note: tf.Tensor) -> list[Any]:
                before: Tensors = []
                for place in range(count):
                    watch = Watch(self._staged.watched, *note)
                    before = self._step(iterator, worker, number, own, handles, before, watch)
                    note, number = tuple(watch.note), number + 1
                    own = self._next(own, handles, within=place + 1 < count)
                with tf.device(self.devices[0]):
                    return [own, tf.maximum(alone - 1, 0), number, *note]

            def goes_on(own: list[_Own], *_: tf.Tensor) -> tf.Tensor:
                turn, _ = own[0]
                return turn[WHAT] != END

            def several(own: list[_Own], alone: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
                turn, _ = own[0]
                return tf.logical_and(turn[WHAT] == ROW, alone == 0)

            own, alone = self._first(first, worker, handles)
            start = [own, alone, own[0][1][PLACE] % RUN, *Watch(self._staged.watched).note]
            if size > 1:
                in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                tf.while_loop(goes_on, partial(steps, 1), start, parallel_iterations=1)
            return worker

        return work

    def _first(self, first: tf.Tensor, worker: tf.Tensor, handles: Handles) -> tuple[list[_Own], tf.Tensor]:
        """Waits until a worker's first step may begin on each ps.

        A worker that begins the run anew goes on where the leader is. Its turn there may have been received before,
        or not, so it is looked up. Another ps may be ahead by one: what is computed for a place whose update is being
        made counts for nothing. When the run is over, or there is another one by now, there is no step for it.

        Returns:
            What it carries on each ps, and how many steps it takes alone before it may take a row.
        """
        microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)  # another function of this worker began in others
        workers = len(self._shop.workers)
        with tf.device(self.devices[0]):
            anew = turnstile.begins_anew(handles["begun"][0], first)
            there = turnstile.last_turn(handles["last"][0])
            place = tf.where(anew, tf.maximum(there[PLACE], first), first)
            over = tf.logical_and(anew, place // RUN != first // RUN)
            head = tf.stack([place, (microseconds + place % RUN) * workers + worker])
            alone = tf.where(anew, tf.constant(_SURE, tf.int64), 0)
        carried = []
        for device, last, queue in zip(self.devices, handles["last"], handles["turns"], strict=True):
            with tf.device(device):
                own = tf.identity(head)
                known = tf.where(anew, turnstile.last_turn(last), [-1, END])
                known = tf.where(over, tf.stack([own[PLACE], END]), known)
                carried.append([turnstile.turn_of(queue, known, own[PLACE]), own])
        return carried, alone

    def _next(self, carried: list[_Own], handles: Handles, *, within: bool) -> list[_Own]:
        """Waits on each ps for the turn of the next step; within a row it is the next one in the queue."""
        following = []
        for device, (before, head), queue in zip(self.devices, carried, handles["turns"], strict=True):
            with tf.device(device):
                own = head + tf.constant([1, len(self._shop.workers)], tf.int64)
                turn = turnstile.next_turn(queue) if within else turnstile.turn_of(queue, before, own[PLACE])
                following.append([turn, own])
        return following

    def _step(
        self,
        iterator: Any,
        worker: tf.Tensor,
        number: tf.Tensor,
        carried: list[_Own],
        handles: Handles,
        before: Tensors,
        watch: Watch,
    ) -> Tensors:
        """A step. Its batch is read after `before`; returns what the next one's is."""
        staged = self._staged
        turns, heads = (dict(zip(self.devices, each, strict=True)) for each in zip(*carried, strict=True))
        left = staged.leave(iterator, worker, number, turns, staged.on_each(itemgetter(KEY), heads), before, watch)
        leader = self.devices[0]
        with tf.device(leader):
            head = after(heads[leader], [each for own in left.operations.values() for each in own])
            turnstile.commit(handles["commits"][0], head, left.counted)
        return [left.loss]

    def _update_function(self, size: int) -> Any:
        leader = self.devices[0]

        def row(count: int, handles: Handles, _: tf.Tensor, places: list[tf.Tensor]) -> list[Any]:
            what, told = turnstile.next_order(handles), []
            done: dict[str, list[Any]] = {}
            for number in range(count):
                with tf.device(leader):
                    place = places[0] + number
                counted, done = self._update(handles, place)
                told.append(counted)
                last = number + 1 == count
                given = self._give(handles, places, number + 1, what if last else WITHIN, done)
            with tf.device(leader):
                all_told = tf.stack(told)
            with tf.control_dependencies([each for own in done.values() for each in own]):
                turnstile.tell(handles, all_told)
            return [what, given]

        def goes_on(what: tf.Tensor, _: list[tf.Tensor]) -> tf.Tensor:
            return what != END

        def several(what: tf.Tensor, _: list[tf.Tensor]) -> tf.Tensor:
            return what == ROW

        @tf.function(autograph=False)
        def updates(handles: Handles, first: tf.Tensor) -> None:
            what = turnstile.next_order(handles)
            start = [what, self._give(handles, list(self._staged.there(first).values()), 0, what, {})]
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
        with tf.device(leader):
            keys, counted = turnstile.committed(handles["commits"], place, sum(self.sizes))
            begin = sum(self.sizes[:2])
            states = counted[:, begin : begin + staged.state_size]
            state = tf.reduce_mean(states, axis=0) if staged.state_size else tf.zeros([0], tf.float64)
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
                counted = tf.concat([counted, tf.fill([counted.shape[0], 1], seconds)], axis=1)
        return counted, done

    def _give(
        self, handles: Handles, places: list[tf.Tensor], further: int, what: tf.Tensor | int, done: dict[str, list[Any]]
    ) -> list[tf.Tensor]:
        """Gives the turns of the places so much further on, on each ps when its part of an update is done."""
        given = []
        for number, device in enumerate(self.devices):
            with tf.device(device):
                given.append(places[number] + further)
                turn = tf.stack([given[-1], tf.cast(what, tf.int64)])
                with tf.control_dependencies(done.get(device, [])):
                    turnstile.give(handles["last"][number], handles[f"turns{number}"], turn)
        return given
