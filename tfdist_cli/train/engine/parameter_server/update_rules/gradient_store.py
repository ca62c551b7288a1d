"""Gradients that wait on the ps until an update takes them.

A worker's gradient crosses to each ps in one piece and stays there under a key. An update is told keys, and applies the
mean of what it finds under them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.protocol.phases import COLUMNS
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE, ParameterServerContext
from tfdist_cli.train.engine.parameter_server.transport import Arrival, Beside
from tfdist_cli.train.engine.step_timer import Watch, noted
from tfdist_cli.train.model.train_step import Tensors, values
from tfdist_cli.train.optimizers.apply import innermost
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.keras_optimizer import iterations
from tfdist_cli.train.variables.sharding import parts

_names = count()

There = dict[str, tf.Tensor]
"""What each ps has of something, by its device."""


@dataclass(frozen=True)
class Left:
    """A gradient that has been left on the ps.

    Args:
        loss: of the batch.
        operations: for each ps those that have left it there.
        counted: what comes with it, flat, float64, by the parts that `GradientStore.sizes` has.
    """

    loss: tf.Tensor
    operations: dict[str, list[Any]]
    counted: tf.Tensor


class GradientStore:
    """The way of a model's gradients by way of the ps.

    Args:
        workshop: the model on its cluster.
        counts_first: whether what comes with a gradient is wanted on the first ps: then it crosses with it.

    Attributes:
        devices: the ps; first the one that counts updates, from which the others hear of each.
        state_size: how many numbers of state come with a gradient.
        sizes: the parts of what is counted: loss and examples, metrics, state, seconds and bytes.
        watched: whether time is taken.
    """

    def __init__(self, workshop: ParameterServerContext, *, counts_first: bool = False) -> None:
        self._shop = workshop
        self._name = f"tfdist-{next(_names)}"
        self._present: list[bool] = []
        """Which parameters have a gradient; known when a worker's function has been traced, which comes first."""
        own = workshop.own_state(workshop.step.state)
        self._state_sizes = [int(np.prod(variable.shape)) for variable in own]
        self.state_size = sum(self._state_sizes)
        devices = [post.device for post in workshop.wire.posts]
        devices += [part.device for variable in own for part in parts(variable)]
        counter = iterations(innermost(workshop.step.model.optimizer)).value.device
        self.devices = sorted(dict.fromkeys(devices), key=lambda device: device != counter) or [CHIEF_DEVICE]
        self._carrier = workshop.wire.carrier(self.devices[0]) if counts_first else None
        self.watched = bool(workshop.rules.phases)
        self.sizes = [2, workshop.totals.size, self.state_size, len(COLUMNS) if self.watched else 0]

    def leave(
        self,
        iterator: Any,
        worker: tf.Tensor,
        number: tf.Tensor,
        after: There,
        keys: There,
        before: Tensors,
        watch: Watch,
    ) -> Left:
        """Computes a gradient of the next batch and leaves it on the ps.

        Args:
            iterator: the worker's data.
            worker: its number.
            number: the step's.
            after: what has to be there before a ps's parameters are read.
            keys: what to leave it under.
            before: what has to be there before the batch is read.
            watch: takes the time.
        """
        shop, step = self._shop, self._shop.step
        watch.after("wait", after)
        with tf.control_dependencies(before):  # else all batches of a function would be there at once
            batch = next_batch(iterator)
        lookup = shop.tables.lookup([batch])
        pulled = shop.wire.pull(lookup, after=after)
        watch.after("data", batch)
        watch.after("pull", pulled.values)
        state = shop.seeds.state_for_step(self._state(after), number, worker)
        scope = shop.tables.parameter_scope(lookup.positions[0])
        result = step.train(pulled.values, state, shop.totals.initial_values(), batch, scope)
        self._present = [gradient is not None for gradient in result.gradients]
        watch.after("compute", result.gradients)
        own = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in shop.own_state(result.state)]
        counted = tf.stack([tf.cast(result.loss, tf.float64), tf.cast(result.examples, tf.float64)])
        counted = tf.concat([counted, shop.totals.pack(result.metrics), *own], axis=0)
        beside = None if self._carrier is None else Beside(self._carrier, counted)
        arrival = shop.wire.push(result.gradients, pulled, beside)
        left: dict[str, list[Any]] = {device: [] for device in self.devices}
        for place, (post, parcel, rows) in enumerate(zip(shop.wire.posts, arrival.parcels, arrival.rows, strict=True)):
            left[post.device].append(self._stage(place, keys[post.device], [parcel, *rows]))
        watch.after("push", left)
        watch.crossed(lambda: shop.wire.sizes(lookup))
        if arrival.beside is None:
            return Left(result.loss, left, tf.concat([counted, *watch.totals()], axis=0))
        with tf.device(self.devices[0]):
            return Left(result.loss, left, tf.concat([arrival.beside, *watch.totals()], axis=0))

    def update(self, keys: There, state: tf.Tensor) -> list[tf.Operation]:
        """Applies the mean of the gradients that were left under some keys; returns what changes variables.

        Args:
            keys: their keys, int64, shape (gradients,).
            state: what the model's state becomes, flat, float64.
        """
        shop = self._shop
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        number = next(iter(keys.values())).shape[0]
        each = self.on_each(tf.unstack, keys)
        arrivals = [self.take({device: own[place] for device, own in each.items()}) for place in range(number)]
        shop.apply(shop.wire.gradients(arrivals, self._carrier), self._present)
        shop.assign_state(tf.split(state, self._state_sizes) if self._state_sizes else [])
        made = graph.get_operations()[before:]
        return [each for each in made if any(part.dtype == tf.resource for part in each.inputs)]

    def take(self, keys: There) -> Arrival:
        """Takes what has been left under a key."""
        parcels, rows = [], []
        for place, post in enumerate(self._shop.wire.posts):
            dtypes, name = self._kept(place)
            with tf.device(post.device):
                key = keys[post.device]
                taken = tf.raw_ops.MapUnstage(key=key, indices=tf.range(len(dtypes)), dtypes=dtypes, shared_name=name)
                parcel, *own = unordered(taken)
                parcels.append(parcel)
                rows.append([tf.reshape(each, [-1]) for each in own])
        return Arrival(parcels, rows)

    def forget(self) -> None:
        """Drops all that has been left and not been taken."""
        for place, post in enumerate(self._shop.wire.posts):
            dtypes, name = self._kept(place)
            with tf.device(post.device):
                tf.raw_ops.MapClear(dtypes=dtypes, shared_name=name)

    def part(self, device: str, operations: list[tf.Operation]) -> list[tf.Operation]:
        """Of what an update consists of what one ps has to do; what is nowhere in particular may be anywhere."""
        return [each for each in operations if each.device == device or each.device not in self.devices]

    def there(self, tensor: tf.Tensor) -> There:
        """Has a tensor on each ps."""
        return self.on_each(tf.identity, dict.fromkeys(self.devices, tensor))

    def on_each(self, function: Callable[[tf.Tensor], Any], there: There) -> dict[str, Any]:
        """Has each ps compute something of what it has."""
        computed = {}
        for device, own in there.items():
            with tf.device(device):
                computed[device] = function(own)
        return computed

    def noted(self, device: str, what: Any) -> list[tf.Tensor]:
        """The time when something is there on a ps, where time is taken."""
        with tf.device(device):
            return [noted(what)] if self.watched else []

    def _state(self, after: There) -> Tensors:
        """The model's state, read where it is."""
        state = []
        for variable in self._shop.step.state:
            devices = {part.device for part in parts(variable)}
            with tf.control_dependencies([there for device, there in after.items() if device in devices]):
                state += values([variable])
        return state

    def _kept(self, place: int) -> tuple[list[tf.DType], str]:
        """The types of what is left for a post, and under what name it is kept."""
        post = self._shop.wire.posts[place]
        return [post.dtype, *[tf.int32] * len(post.tables)], f"{self._name}-{place}"

    def _stage(self, place: int, key: tf.Tensor, tensors: Tensors) -> Any:
        dtypes, name = self._kept(place)
        with tf.device(self._shop.wire.posts[place].device):
            staged = tf.raw_ops.MapStage(
                key=key, indices=tf.range(len(tensors)), values=tensors, dtypes=dtypes, shared_name=name
            )
            return unordered(staged)
