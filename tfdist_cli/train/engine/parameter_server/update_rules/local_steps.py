"""Steps that a worker takes on a copy of its own, before the ps have what they changed.

A round of k steps reads the parameters and the optimizer's slots once, updates its copy k times as one process would,
and gives the ps the difference. They add it to what the parameters are by then: each step of each worker moves them,
and one worker alone trains as one process does (Ho et al., More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server, 2013, section 2: updates are added up, and a worker sees its own at once; Dean et al., Large
Scale Distributed Deep Networks, 2012, section 4.1, exchange as seldom).

A slot is not simply added up: of a mean that keeps β of itself in each update, βᵏ is left after k. With s₀ read and
sₖ at the end, the ps make of what it is by then, s, βᵏ·s + (sₖ − βᵏ·s₀): what it would be if the k gradients had come
there one after the other. For sums, such as Adagrad's, β is 1. Of largest values it is max(βᵏ·s, sₖ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.parameter_server.transport import Pulled, Transport
from tfdist_cli.train.model.embeddings import Lookup
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.apply import (
    StoredParameter,
    apply_fused,
    innermost,
    learning_rate_at,
    substituted,
    why_not_fused,
)
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import Slot, fused_update_of, row_lock, why_no_kernel
from tfdist_cli.train.tf_compat.keras_optimizer import LEARNING_RATE, learning_rate
from tfdist_cli.train.tf_compat.variables import Read, local_variable
from tfdist_cli.train.variables.sharding import Gradient, parts

_PARAMETER = Slot("", decay_rate=1.0)
"""A parameter is joined as a slot is that sums up."""


@dataclass(frozen=True)
class Copy:
    """A worker's own parameters and slots.

    Args:
        held: both, each in one piece; a table's are the rows that are looked up.
        pulled: the parameters as they were read.
        slots: the slots as they were read.
        touched: for each parameter how many updates it has had; a table's for each of its rows, int32, shape (n,).
    """

    held: list[StoredParameter]
    pulled: Pulled
    slots: Pulled
    touched: list[Any]

    def values(self) -> Tensors:
        """The parameters as they are now.

        Gradient functions of the model's (`tf.custom_gradient`) look for variables in the graph behind what they use,
        up to where gradients end, and fail on those that are a function's own.
        """
        return [tf.stop_gradient(tf.convert_to_tensor(held.shards[0])) for held in self.held]


class LocalSteps:
    """Rounds of a worker's own steps.

    Args:
        optimizer: the model's, built.
        parameters: the model's.
        tables: the numbers of those that are looked up.
        wire: the parameters' way between workers and ps.
        learning_rate: what becomes of the optimizer's rate.

    Raises:
        TrainingError: the optimizer's update is left to Keras, or may be left out.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        parameters: Sequence[keras.Variable],
        tables: Sequence[int],
        wire: Transport,
        learning_rate: RateScaling | None,
    ) -> None:
        if optimizer is not innermost(optimizer):
            raise TrainingError(
                "local_steps cannot leave out updates, which an optimizer that scales the loss does (mixed_float16)",
                hint="take the mixed_bfloat16 policy, or leave local_steps out",
            )
        rule, why = fused_update_of(optimizer), why_not_fused(optimizer, parameters)
        if rule is None or why:
            raise TrainingError(
                f"local_steps needs updates that TensorFlow's kernels can make: {why or why_no_kernel(optimizer)}",
                hint="take another optimizer, or updates: {push_every: N}, which exchanges as seldom",
            )
        self._optimizer, self._parameters, self._tables = optimizer, parameters, tables
        self._rule, self._rate, self._wire = rule, learning_rate, wire
        many = len(rule.slots)
        # Always as they are: float16 has no room for squares of gradients.
        self._slot_wire = Transport(
            [slot for variable in parameters for slot in rule.slot_variables(variable)],
            [place * many + kind for place in tables for kind in range(many)],
            device_scope=wire.device_scope,
        )

    def copy(self, lookup: Lookup, pulled: Pulled) -> Copy:
        """Parameters that have been read, and their slots, as variables of the worker.

        Args:
            lookup: which rows of tables.
            pulled: the parameters.
        """
        slots = self._slot_wire.pull(self._of_slots(lookup))
        each = iter(slots.values)
        with self._wire.device_scope():
            held = [
                StoredParameter(
                    variable, [local_variable(value)], [[local_variable(next(each))] for _ in self._rule.slots]
                )
                for variable, value in zip(self._parameters, pulled.values, strict=True)
            ]
        touched: list[Any] = [0] * len(held)
        for place in self._tables:
            touched[place] = tf.zeros(tf.shape(pulled.values[place])[:1], tf.int32)
        return Copy(held, pulled, slots, touched)

    def steps(self, copy: Copy, gradients: Iterator[Sequence[Any]], updates: tf.Tensor) -> None:
        """Updates a copy.

        Args:
            copy: it.
            gradients: for each step its gradients, which are computed from the copy when they are asked for.
            updates: how many updates came before the first one, int64, shape ().
        """
        own = learning_rate(self._optimizer)
        # It is on a ps: once a round, not once a step.
        read = {LEARNING_RATE: Read(tf.identity(own.value))} if isinstance(own, keras.Variable) else {}
        for number, given in enumerate(gradients):
            with self._wire.device_scope():
                pieces = [self._gradient(copy, place, gradient) for place, gradient in enumerate(given)]
            with substituted(self._optimizer, read):
                rate = learning_rate_at(learning_rate(self._optimizer), updates + number, self._rate)
            apply_fused(self._rule, pieces, copy.held, updates + number, rate)

    def join(self, copy: Copy) -> tuple[Tensors, Callable[[], None]]:
        """Sends what a copy's updates have changed to the ps.

        Returns:
            What has arrived there; and what adds it to parameters and slots, at each ps one worker's after the other's.
        """
        with self._wire.device_scope():
            return self._sent(copy)

    def _sent(self, copy: Copy) -> tuple[Tensors, Callable[[], None]]:
        left = [[_left(kind, touched) for kind in self._rule.slots] for touched in copy.touched]
        changed = [
            None if _is_never(touched) else value - before
            for touched, value, before in zip(copy.touched, copy.values(), copy.pulled.values, strict=True)
        ]
        parameters = self._wire.push(changed, copy.pulled)
        before = iter(copy.slots.values)
        moved = [
            _change(kind, piece, next(before), share)
            for held, shares in zip(copy.held, left, strict=True)
            for kind, (piece,), share in zip(self._rule.slots, held.slots, shares, strict=True)
        ]
        slots = self._slot_wire.push(moved, copy.slots)
        given = self._wire.gradients([parameters]), self._slot_wire.gradients([slots])
        return [*parameters.parcels, *slots.parcels], partial(self._add, copy, *given, left)

    def sizes(self, lookup: Lookup) -> dict[str, tf.Tensor]:
        """See `Transport.sizes`; with the slots."""
        parameters, slots = self._wire.sizes(lookup), self._slot_wire.sizes(self._of_slots(lookup))
        return {name: size + slots[name] for name, size in parameters.items()}

    def _add(self, copy: Copy, changed: list[Gradient], moved: list[Gradient], left: list[list[Any]]) -> None:
        each = iter(moved)
        joins: dict[str, list[tuple[Any, Callable[[], Any]]]] = {}
        for place, variable in enumerate(self._parameters):
            stored = [variable, *self._rule.slot_variables(variable)]
            given = [changed[place], *(next(each) for _ in self._rule.slots)]
            if _is_never(copy.touched[place]):
                continue
            kinds, shares = [_PARAMETER, *self._rule.slots], [_PARAMETER.decay_rate, *left[place]]
            for kept, kind, pieces, share in zip(stored, kinds, given, shares, strict=True):
                of_each = _by_shard(share, [copy.pulled.counts.get((place, index)) for index in range(len(pieces))])
                for shard, piece, own in zip(parts(kept), pieces, of_each, strict=True):
                    join = partial(_joined, kind, shard, piece, _at(shard, own))
                    joins.setdefault(shard.device, []).append((piece, join))
        for device, some in joins.items():
            arrived = tf.nest.flatten([piece for piece, _ in some], expand_composites=True)
            row_lock(device, arrived, [join for _, join in some])

    def _of_slots(self, lookup: Lookup) -> Lookup:
        """What of the slots goes with looked-up rows: the same rows of each."""
        rows = iter(lookup.rows)
        of_tables = [[next(rows) for _ in self._wire.shards[place]] for place in self._tables]
        return Lookup([own for shards in of_tables for _ in self._rule.slots for own in shards], [])

    def _gradient(self, copy: Copy, place: int, gradient: Any) -> Gradient | None:
        """A parameter's gradient, rows of a table each once; and counts what it touches."""
        if gradient is None:
            return None
        if place not in self._tables:
            copy.touched[place] += 1
            return [tf.convert_to_tensor(gradient)]
        shape = tf.shape(copy.pulled.values[place])
        rows, where = tf.unique(gradient.indices)
        summed = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
        copy.touched[place] += tf.math.unsorted_segment_sum(tf.ones_like(rows), rows, shape[0])
        return [tf.IndexedSlices(summed, rows, shape)]


def _is_never(touched: Any) -> bool:
    """Whether a parameter has had no update at all."""
    return isinstance(touched, int) and touched == 0


def _left(kind: Slot, touched: Any) -> Any:
    """βᵏ: a number, or float64 for each row of a table, shape (n,)."""
    if kind.decay_rate == 1.0:
        return 1.0
    if isinstance(touched, int):
        return kind.decay_rate**touched
    return tf.pow(tf.cast(kind.decay_rate, tf.float64), tf.cast(touched, tf.float64))


def _by_shard(left: Any, counts: list[Any]) -> list[Any]:
    """What of `_left` is each shard's; `counts` tells how many rows have been looked up in it."""
    if isinstance(left, float) or len(counts) == 1:
        return [left] * len(counts)
    return tf.split(left, tf.stack(counts), num=len(counts))


def _at(shard: Any, left: Any) -> Any:
    """The same, where the shard is."""
    if isinstance(left, float):
        return left
    with tf.device(shard.device):
        return tf.identity(left)


def _scaled(value: tf.Tensor, left: Any) -> tf.Tensor:
    """What is left of a value, or of each of its rows."""
    if isinstance(left, float):
        return value if left == 1.0 else value * tf.cast(left, value.dtype)
    ones = tf.ones([value.shape.rank - 1], tf.int32)
    return value * tf.reshape(tf.cast(left, value.dtype), tf.concat([[-1], ones], axis=0))


def _change(kind: Slot, piece: Any, before: tf.Tensor, left: Any) -> tf.Tensor:
    """What the ps add to what is left of a slot; or, of largest values, compare with it."""
    value = tf.convert_to_tensor(piece)
    return value if kind.kind == "largest" else value - _scaled(before, left)


def _joined(kind: Slot, shard: Any, piece: Any, left: Any) -> Any:
    """Joins what a worker has changed with what there is."""
    rows = piece.indices if isinstance(piece, tf.IndexedSlices) else None
    there = tf.convert_to_tensor(shard) if rows is None else shard.sparse_read(rows)
    there, given = _scaled(there, left), piece if rows is None else piece.values
    value = tf.maximum(there, given) if kind.kind == "largest" else there + given
    if kind.kind == "positive":
        value = tf.maximum(value, 0)
    if rows is None:
        return shard.assign(value, read_value=False)
    return tf.raw_ops.ResourceScatterUpdate(resource=shard.handle, indices=rows, updates=value)
