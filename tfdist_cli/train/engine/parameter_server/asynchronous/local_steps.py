"""Local steps: a worker takes several steps on its own copy of the variables before it sends the changes to the ps.

A round of k steps reads the parameters and the optimizer's slots once, updates the worker's copy k times as a single
process would, and sends the difference to the ps. They add it to the current parameters: each step of each worker moves
them, and one worker alone trains as a single process does (Ho et al., More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server, 2013, section 2: updates are added up, and a worker sees its own at once; Dean et
al., Large Scale Distributed Deep Networks, 2012, section 4.1, exchange at intervals, too).

A slot cannot be added up like that: of a moving average that keeps β of itself in each update, βᵏ is left after k. With
s₀ read and sₖ at the end of the round, the ps turn the current value s into βᵏ·s + (sₖ − βᵏ·s₀): the value as if the k
gradients had arrived there one after the other. For sums, such as Adagrad's, β is 1. For maxima it is max(βᵏ·s, sₖ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    substituted,
    why_not_fused,
)
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import Slot, fused_update_of, row_lock, why_no_kernel
from tfdist_cli.train.optimizers.row_sums import row_sums
from tfdist_cli.train.optimizers.terms import SummedTerms, Terms, split_gradient
from tfdist_cli.train.optimizers.update_numbers import SentNumbers, learning_rate_at
from tfdist_cli.train.tf_compat.keras_optimizer import LEARNING_RATE, learning_rate
from tfdist_cli.train.tf_compat.variables import Read, local_variable
from tfdist_cli.train.variables.changed_rows import marked
from tfdist_cli.train.variables.rows import assign_rows
from tfdist_cli.train.variables.sharding import Gradient, parts

_PARAMETER = Slot("", decay_rate=1.0)
"""A parameter is merged like a slot that is a sum."""


@dataclass(frozen=True)
class WorkerCopy:
    """A worker's copy of parameters and slots.

    Args:
        variables: for each parameter the copy of it and of its slots; of a table only the looked-up rows.
        pulled: the parameters as they were read.
        slots: the slots as they were read.
        update_counts: for each parameter how many updates its copy has had; for a table one count for each of its rows,
            int32, shape (n,).
    """

    variables: list[StoredParameter]
    pulled: Pulled
    slots: Pulled
    update_counts: list[Any]

    def values(self) -> Tensors:
        """The current parameters of the copy.

        A model's gradient functions (`tf.custom_gradient`) search the graph behind their inputs for variables, up to
        where gradients stop, and fail if they find variables that exist only inside a function.
        """
        return [tf.stop_gradient(tf.convert_to_tensor(own.shards[0])) for own in self.variables]


class LocalSteps:
    """Takes local steps, and merges the changes on the ps.

    Args:
        optimizer: the model's, built.
        parameters: the model's.
        tables: the indices of those that are looked up.
        transport: moves the parameters between workers and ps.
        rate: scales the optimizer's learning rate.
        terms: what updates take of each term of a gradient, by the index of the parameter.

    Raises:
        TrainingError: the optimizer's updates are computed by Keras, or may be skipped.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        parameters: Sequence[keras.Variable],
        tables: Sequence[int],
        transport: Transport,
        rate: RateScaling | None,
        terms: Mapping[int, Terms] | None = None,
    ) -> None:
        if optimizer is not innermost(optimizer):
            raise TrainingError(
                "local_steps cannot skip updates, but an optimizer that scales the loss does (mixed_float16)",
                code="loss-scaling-unsupported",
                hint="use the mixed_bfloat16 policy, or remove local_steps",
            )
        fused, why = fused_update_of(optimizer), why_not_fused(optimizer, parameters)
        if fused is None or why:
            raise TrainingError(
                f"local_steps needs an optimizer with TensorFlow kernels: {why or why_no_kernel(optimizer)}",
                code="optimizer-without-kernels",
                hint="use another optimizer, or updates: {push_every: N}, which exchanges as seldom",
            )
        self._optimizer, self._parameters, self._tables = optimizer, parameters, tables
        self._fused, self._rate, self._transport, self._terms = fused, rate, transport, terms or {}
        count = len(fused.slots)
        # Always in their own type: float16 has no range for squares of gradients.
        self._slot_transport = Transport(
            [slot for variable in parameters for slot in fused.slot_variables(variable)],
            [table * count + slot for table in tables for slot in range(count)],
            device_scope=transport.device_scope,
            shared=transport.shared,
        )

    def copy(self, lookup: Lookup, pulled: Pulled) -> WorkerCopy:
        """Makes a copy of parameters that have been read, and of their slots, as variables of the worker.

        Args:
            lookup: the rows of tables.
            pulled: the parameters.
        """
        slots = self._slot_transport.pull(self._lookup_of_slots(lookup))
        each = iter(slots.values)
        with self._transport.device_scope():
            variables = [
                StoredParameter(
                    variable, [local_variable(value)], [[local_variable(next(each))] for _ in self._fused.slots]
                )
                for variable, value in zip(self._parameters, pulled.values, strict=True)
            ]
        counts: list[Any] = [0] * len(variables)
        for table in self._tables:
            counts[table] = tf.zeros(tf.shape(pulled.values[table])[:1], tf.int32)
        return WorkerCopy(variables, pulled, slots, counts)

    def update(self, copy: WorkerCopy, gradients: Iterator[Sequence[Any]], updates: tf.Tensor) -> None:
        """Updates a copy with the gradients of one step after the other.

        Args:
            copy: the copy.
            gradients: for each step its gradients; they are computed with the copy when they are requested.
            updates: how many updates were applied before the first one, int64, shape ().
        """
        own = learning_rate(self._optimizer)
        # It is on a ps: read once a round, not once a step.
        read = {LEARNING_RATE: Read(tf.identity(own.value))} if isinstance(own, keras.Variable) else {}
        for number, given in enumerate(gradients):
            with self._transport.device_scope():
                pieces = [self._gradient(copy, parameter, gradient) for parameter, gradient in enumerate(given)]
            with substituted(self._optimizer, read):
                rate = learning_rate_at(learning_rate(self._optimizer), updates + number, self._rate)
            apply_fused(self._fused, pieces, copy.variables, SentNumbers(rate, updates + number))

    def send(self, copy: WorkerCopy) -> tuple[Tensors, Callable[[], None]]:
        """Sends the changes of a copy to the ps.

        Returns:
            The tensors that have arrived there; and a function that merges them into parameters and slots. Each ps
            merges the changes of one worker after the other.
        """
        with self._transport.device_scope():
            return self._sent(copy)

    def _sent(self, copy: WorkerCopy) -> tuple[Tensors, Callable[[], None]]:
        decays = [[_decay(slot, count) for slot in self._fused.slots] for count in copy.update_counts]
        changed = [
            None if _is_unchanged(count) else value - before
            for count, value, before in zip(copy.update_counts, copy.values(), copy.pulled.values, strict=True)
        ]
        parameters = self._transport.push(changed, copy.pulled)
        before = iter(copy.slots.values)
        changed_slots = [
            _change(slot, piece, next(before), decay)
            for own, own_decays in zip(copy.variables, decays, strict=True)
            for slot, (piece,), decay in zip(self._fused.slots, own.slots, own_decays, strict=True)
        ]
        slots = self._slot_transport.push(changed_slots, copy.slots)
        changes = self._transport.gradients([parameters]), self._slot_transport.gradients([slots])
        return [*parameters.packed, *slots.packed], partial(self._merge, copy, *changes, decays)

    def sizes(self, lookup: Lookup) -> dict[str, tf.Tensor]:
        """See `Transport.sizes`; slots are included."""
        parameters, slots = self._transport.sizes(lookup), self._slot_transport.sizes(self._lookup_of_slots(lookup))
        return {name: size + slots[name] for name, size in parameters.items()}

    def _merge(
        self, copy: WorkerCopy, changed: list[Gradient], changed_slots: list[Gradient], decays: list[list[Any]]
    ) -> None:
        each = iter(changed_slots)
        merges: dict[str, list[tuple[Any, Callable[[], Any]]]] = {}
        for parameter, variable in enumerate(self._parameters):
            stored = [variable, *self._fused.slot_variables(variable)]
            changes = [changed[parameter], *(next(each) for _ in self._fused.slots)]
            if _is_unchanged(copy.update_counts[parameter]):
                continue
            slots, own_decays = [_PARAMETER, *self._fused.slots], [_PARAMETER.decay_rate, *decays[parameter]]
            for target, slot, pieces, decay in zip(stored, slots, changes, own_decays, strict=True):
                counts = [copy.pulled.counts.get((parameter, index)) for index in range(len(pieces))]
                for shard, piece, own in zip(parts(target), pieces, _by_shard(decay, counts), strict=True):
                    merge = partial(_merged, slot, shard, piece, _on_device_of(shard, own))
                    merges.setdefault(shard.device, []).append((piece, merge))
        for device, some in merges.items():
            arrived = tf.nest.flatten([piece for piece, _ in some], expand_composites=True)
            row_lock(device, arrived, [merge for _, merge in some])

    def _lookup_of_slots(self, lookup: Lookup) -> Lookup:
        """The rows of slots that belong to the looked-up rows of tables: the same rows of each slot."""
        rows = iter(lookup.rows)
        of_tables = [[next(rows) for _ in self._transport.shards[table]] for table in self._tables]
        return Lookup([own for shards in of_tables for _ in self._fused.slots for own in shards], [])

    def _gradient(self, copy: WorkerCopy, parameter: int, gradient: Any) -> Gradient | None:
        """A parameter's gradient, each row of a table once; counts the update."""
        if gradient is None:
            return None
        kind = self._terms.get(parameter)
        if parameter not in self._tables:
            copy.update_counts[parameter] += 1
            return split_gradient(gradient, copy.variables[parameter].shards, kind)
        shape = tf.shape(copy.pulled.values[parameter])
        rows, indices = tf.unique(gradient.indices)
        copy.update_counts[parameter] += tf.math.unsorted_segment_sum(tf.ones_like(rows), rows, shape[0])
        given = [gradient.values] if kind is None else [gradient.values, kind.of(gradient.values)]
        sums = row_sums(given, indices, tf.size(rows))
        total = tf.IndexedSlices(sums[0], rows, shape)
        return [total if kind is None else SummedTerms(total, sums[1], kind)]


def _is_unchanged(count: Any) -> bool:
    """Whether a parameter has had no update at all."""
    return isinstance(count, int) and count == 0


def _decay(slot: Slot, count: Any) -> Any:
    """βᵏ after k updates: a number, or float64 for each row of a table, shape (n,)."""
    if slot.decay_rate == 1.0:
        return 1.0
    if isinstance(count, int):
        return slot.decay_rate**count
    return tf.pow(tf.cast(slot.decay_rate, tf.float64), tf.cast(count, tf.float64))


def _by_shard(decay: Any, counts: list[Any]) -> list[Any]:
    """Splits `_decay` by shards.

    Args:
        decay: a number, or one for each looked-up row.
        counts: how many rows have been looked up in each shard.
    """
    if isinstance(decay, float) or len(counts) == 1:
        return [decay] * len(counts)
    return tf.split(decay, tf.stack(counts), num=len(counts))


def _on_device_of(shard: Any, decay: Any) -> Any:
    if isinstance(decay, float):
        return decay
    with tf.device(shard.device):
        return tf.identity(decay)


def _decayed(value: tf.Tensor, decay: Any) -> tf.Tensor:
    """Multiplies a value, or each of its rows, by its decay."""
    if isinstance(decay, float):
        return value if decay == 1.0 else value * tf.cast(decay, value.dtype)
    ones = tf.ones([value.shape.rank - 1], tf.int32)
    return value * tf.reshape(tf.cast(decay, value.dtype), tf.concat([[-1], ones], axis=0))


def _change(slot: Slot, piece: Any, before: tf.Tensor, decay: Any) -> tf.Tensor:
    """What the ps add to the decayed slot; for maxima, what they compare it with."""
    value = tf.convert_to_tensor(piece)
    return value if slot.kind == "largest" else value - _decayed(before, decay)


def _merged(slot: Slot, shard: Any, piece: Any, decay: Any) -> Any:
    """Merges a worker's change into the current value of a shard."""
    rows = piece.indices if isinstance(piece, tf.IndexedSlices) else None
    current = tf.convert_to_tensor(shard) if rows is None else shard.sparse_read(rows)
    current, change = _decayed(current, decay), piece if rows is None else piece.values
    value = tf.maximum(current, change) if slot.kind == "largest" else current + change
    if slot.kind == "positive":
        value = tf.maximum(value, 0)
    if rows is None:
        return shard.assign(value, read_value=False)
    return marked(shard, rows, assign_rows(shard, rows, value))
