"""Applying gradients with the model's own optimizer, so that each update counts exactly once.

Keras counts `iterations` by reading, adding and writing back, which loses counts when workers update at the same time.
Here the count is one atomic addition. Its result is the update's own number, which the optimizer's formulas and its
learning-rate schedule then see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.optimizers.learning_rate import Rate
from tfdist_cli.train.optimizers.registry import Rule, decay, decays, fused, in_turn, rule_of, why_not
from tfdist_cli.train.tf_compat import keras_optimizer
from tfdist_cli.train.tf_compat.keras_optimizer import (
    ITERATIONS,
    LEARNING_RATE,
    disable_gradient_sums,
    inner_index_of,
    iterations,
)
from tfdist_cli.train.tf_compat.patching import replaced
from tfdist_cli.train.tf_compat.variables import Read
from tfdist_cli.train.variables.sharding import Gradient, parts

_SEVERAL: Any = getattr(keras.optimizers, "MultiOptimizer", ())
"""Keras's optimizer that has several ones update some of the parameters each; older versions have none."""


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    learning_rate: Rate | None = None,
) -> tf.Tensor:
    """Updates the parameters where they live.

    Args:
        optimizer: built for the parameters. One that scales the loss (`mixed_float16`) takes back its scale, and leaves
            an update out whose gradients are not finite.
        gradients: one per parameter, by shards; None where there is none.
        parameters: the variables to update.
        learning_rate: what becomes of the optimizer's rate; None leaves it.

    Returns:
        The number of updates before this one, int64, shape (); of one that is left out, too. Without parameters there
        is no update, as in Keras.
    """
    if not parameters:
        return tf.identity(tf.convert_to_tensor(iterations(innermost(optimizer)).value))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        present = [part for gradient in gradients if gradient is not None for part in gradient]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(part))) for part in present])
        return tf.cond(
            finite,
            lambda: _take_scaled(optimizer, gradients, parameters, learning_rate),
            lambda: _lower_scale(optimizer),
        )
    if isinstance(optimizer, _SEVERAL):
        return _apply_each(optimizer, gradients, parameters, learning_rate)
    counter = iterations(optimizer).value
    rule = None if _needs_keras(optimizer, parameters) else rule_of(optimizer)
    # All of it where the counter is: from there every ps has it by one message, not by way of the worker.
    with tf.device(counter.device):
        with tf.control_dependencies(_arrived(counter, gradients, parameters)[: None if rule is None else 1]):
            number = counter.assign_add(1, read_value=True) - 1
        rate = rate_of(keras_optimizer.learning_rate(optimizer), number, learning_rate)
        with tf.control_dependencies([number]):  # what Keras's code takes beside it may be there before
            rate = tf.identity(rate)
    if rule is None:
        _apply_by_keras(optimizer, gradients, parameters, number, rate)
    else:
        held = [LocalCopy.of(variable, rule.slots(optimizer, variable)) for variable in parameters]
        apply_by_rule(rule, optimizer, gradients, held, number, rate)
    return number


def _apply_each(
    optimizer: Any,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    learning_rate: Rate | None,
) -> tf.Tensor:
    """The same for each optimizer of a `MultiOptimizer`, which counts its own updates beside."""
    for inner, places in _divided_among(optimizer, parameters):
        own = [gradients[place] for place in places], [parameters[place] for place in places]
        apply(inner, *own, learning_rate)
    counter = iterations(optimizer).value
    with tf.device(counter.device), tf.control_dependencies(_arrived(counter, gradients, parameters)[:1]):
        return counter.assign_add(1, read_value=True) - 1


def _divided_among(optimizer: Any, parameters: Sequence[keras.Variable]) -> list[tuple[Any, list[int]]]:
    """The optimizers that update some parameters, each with the places of those that it updates."""
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, _SEVERAL):
        return [(optimizer, list(range(len(parameters))))]
    numbers = [inner_index_of(optimizer, variable) for variable in parameters]
    each = [[place for place, own in enumerate(numbers) if own == n] for n in range(len(optimizer.optimizers))]
    return [(inner, places) for inner, places in zip(optimizer.optimizers, each, strict=True) if places]


def _arrived(counter: Any, gradients: Sequence[Gradient | None], parameters: Sequence[keras.Variable]) -> list[Any]:
    """What to wait for before an update is counted: else a function of several steps counts all of them as it begins.

    One part of the gradients is enough for that: the first one, which is on the counter's own ps if any is. But Keras's
    code may decay a parameter, given no more than the rate, while a worker has still to read it.
    """
    found = [
        (shard.device != counter.device, _values(part))
        for variable, gradient in zip(parameters, gradients, strict=True)
        for shard, part in zip(parts(variable), gradient or [], strict=bool(gradient))
    ]
    return [values for _, values in sorted(found, key=lambda each: each[0])]


def updates_rows(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> bool:
    """Whether rows of a table can be updated without touching the others."""
    return all(
        rule_of(inner) is not None and not _needs_keras(inner, [parameters[place] for place in places])
        for inner, places in _divided_among(optimizer, parameters)
    )


def why_by_keras(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> str | None:
    """Why updates are computed by Keras's own operations, not by fused kernels; None if they are not."""
    for inner, places in _divided_among(optimizer, parameters):
        own = [parameters[place] for place in places]
        why = why_not(inner) if rule_of(inner) is None else _needs_keras(inner, own)
        if why:
            return why
    return None


def _needs_keras(optimizer: Any, parameters: Sequence[keras.Variable]) -> str | None:
    """What an update consists of that is left to Keras's own `apply`."""
    if optimizer.use_ema:
        return "use_ema keeps averages"
    if optimizer.gradient_accumulation_steps:
        return "gradient_accumulation_steps adds gradients up"
    for variable in parameters:
        if variable.constraint is not None:
            return f"{variable.path} has a constraint"
        if getattr(variable, "overwrite_with_gradient", False):
            return f"{variable.path} is overwritten with its gradient"
    return None


def rate_of(own: Any, number: tf.Tensor, learning_rate: Rate | None) -> tf.Tensor:
    """The learning rate of an update, read once, not once for each parameter.

    Args:
        own: the optimizer's: a variable, a schedule or a function.
        number: how many updates came before, int64, shape ().
        learning_rate: what becomes of the optimizer's rate; None leaves it.
    """
    if isinstance(own, keras.optimizers.schedules.LearningRateSchedule):
        rate = tf.convert_to_tensor(own(number))
    else:
        rate = tf.convert_to_tensor(own.value if isinstance(own, keras.Variable) else own())
    return rate if learning_rate is None else learning_rate.at(rate, number)


@dataclass(frozen=True)
class LocalCopy:
    """A parameter, and where it is.

    Args:
        variable: Keras's; it says whether the parameter decays.
        pieces: TensorFlow's variables that hold its parts.
        slots: each slot's pieces, in the order of the optimizer's rule.
    """

    variable: keras.Variable
    pieces: list[Any]
    slots: list[list[Any]]

    @classmethod
    def of(cls, variable: keras.Variable, slots: Sequence[keras.Variable]) -> LocalCopy:
        """One that is where its variable lives."""
        return cls(variable, parts(variable), [parts(slot) for slot in slots])


def apply_by_rule(
    rule: Rule,
    optimizer: Any,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[LocalCopy],
    number: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    """Updates parameters, each piece on its own device.

    Args:
        rule: the optimizer's.
        optimizer: built.
        gradients: one per parameter, by pieces; None where there is none.
        parameters: what to update.
        number: how many updates came before, int64, shape ().
        rate: the learning rate, shape ().
    """
    present = [(held, gradient) for held, gradient in zip(parameters, gradients, strict=True) if gradient]
    if optimizer.loss_scale_factor is not None:
        plain = partial(_divided, by=optimizer.loss_scale_factor)
        present = [(held, _each(held.pieces, gradient, plain)) for held, gradient in present]
    some: dict[str, list[tuple[tf.IndexedSlices, Callable[[], Any]]]] = {}
    known = _Sent(rate, number)
    for held, gradient in _clipped(optimizer, present):
        decaying = decays(optimizer, held.variable)
        for index, (shard, part) in enumerate(zip(held.pieces, gradient, strict=True)):
            own = [slot[index] for slot in held.slots]
            rate, number = known.on(shard.device)
            with tf.device(shard.device):
                speed = tf.cast(rate, shard.dtype)
                values = tf.cast(_values(part), shard.dtype)
                if isinstance(part, tf.IndexedSlices):
                    args = optimizer, shard, own, values, part.indices, speed, number
                    some.setdefault(shard.device, []).append((part, partial(rule.sparse, *args, decaying=decaying)))
                else:
                    with tf.control_dependencies([values]):  # before it a worker may still have to read the piece
                        before = [decay(optimizer, shard, speed)] if decaying else []
                    with tf.control_dependencies(before):
                        rule.dense(optimizer, shard, own, values, speed, number)
    for device, updates in some.items():
        given = [tensor for part, _ in updates for tensor in (part.values, part.indices)]
        in_turn(device, given, [update for _, update in updates])


class _Sent:
    """An update's learning rate and number, which every other device is sent as one tensor.

    Args:
        rate: the learning rate, shape ().
        number: how many updates came before, int64, shape ().
    """

    def __init__(self, rate: tf.Tensor, number: tf.Tensor) -> None:
        self._rate = rate
        with tf.device(number.device):
            # float64 holds every float32 and every number of updates there will ever be (2**53).
            self._both = tf.stack([tf.cast(rate, tf.float64), tf.cast(number, tf.float64)])
        self._there = {number.device: (rate, number)}

    def on(self, device: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Both, on a device: the rate in its own type, the number as int64."""
        if device not in self._there:
            with tf.device(device):
                rate, number = tf.unstack(tf.identity(self._both))
                self._there[device] = tf.cast(rate, self._rate.dtype), tf.cast(number, tf.int64)
        return self._there[device]


def _clipped(optimizer: Any, present: list[tuple[LocalCopy, Gradient]]) -> list[tuple[LocalCopy, Gradient]]:
    """Gradients as Keras clips them; a parameter's norm is that of all its pieces."""
    if not (optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm):
        return present
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue

        def clipped(values: tf.Tensor) -> tf.Tensor:
            return tf.clip_by_value(values, -limit, limit)

        return [(held, _each(held.pieces, gradient, clipped)) for held, gradient in present]
    squares = [
        [_on(shard, _square, part) for shard, part in zip(held.pieces, gradient, strict=True)]
        for held, gradient in present
    ]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        limits = [tf.maximum(tf.sqrt(tf.add_n(own)), optimizer.clipnorm) / optimizer.clipnorm for own in squares]
    else:
        total = tf.sqrt(tf.add_n([square for own in squares for square in own]))
        limits = [tf.maximum(total, optimizer.global_clipnorm) / optimizer.global_clipnorm] * len(present)
    return [
        (held, _each(held.pieces, gradient, partial(_divided, by=limit)))
        for (held, gradient), limit in zip(present, limits, strict=True)
    ]


def _each(pieces: Sequence[Any], gradient: Gradient, function: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    """A function of the values of each piece's gradient, where the piece is."""
    changed = []
    for shard, part in zip(pieces, gradient, strict=True):
        values = _on(shard, function, part)
        sparse = isinstance(part, tf.IndexedSlices)
        changed.append(tf.IndexedSlices(values, part.indices, part.dense_shape) if sparse else values)
    return changed


def _divided(values: tf.Tensor, by: tf.Tensor | float) -> tf.Tensor:
    return values / tf.cast(by, values.dtype)


def _square(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def _on(shard: Any, function: Callable[[tf.Tensor], tf.Tensor], part: Any) -> tf.Tensor:
    with tf.device(shard.device):
        return function(_values(part))


def _values(part: Any) -> tf.Tensor:
    """The numbers of a gradient; rows that it names once have the norm of the whole."""
    return part.values if isinstance(part, tf.IndexedSlices) else part


def _apply_by_keras(
    optimizer: Any,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    number: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    whole = [each and (each[0] if len(each) == 1 else tf.concat(each, axis=0)) for each in gradients]
    # Keras updates variables from within a replica only. There is one; strategy.run would trace it in a thread of its
    # own, which the scope doesn't reach.
    replica = tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
    read = {ITERATIONS: Read(number), LEARNING_RATE: Read(rate)}
    with in_place_of(optimizer, read), fused(optimizer), replica:
        optimizer.apply(whole, list(parameters))


def in_place_of(optimizer: keras.optimizers.Optimizer, read: dict[str, Read]) -> AbstractContextManager[None]:
    """Within it, an optimizer has values that have been read in the place of variables."""
    return replaced(optimizer, read)


def leave_sums_to_engine(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps Keras from summing gradients over replicas: engines hand it gradients that are summed already."""
    for inner in updating(optimizer):
        disable_gradient_sums(inner)


def learning_rates(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The learning rates that are variables: callbacks set them."""
    rates = [keras_optimizer.learning_rate(inner) for inner in updating(optimizer)]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def updating(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The optimizers that update: several where a `MultiOptimizer` divides the parameters among them."""
    optimizer = innermost(optimizer)
    return list(optimizer.optimizers) if isinstance(optimizer, _SEVERAL) else [optimizer]


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that updates; `mixed_float16` wraps it in one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _take_scaled(
    optimizer: keras.optimizers.LossScaleOptimizer,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    learning_rate: Rate | None,
) -> tf.Tensor:
    scale = tf.convert_to_tensor(optimizer.dynamic_scale.value)
    plain = [
        None if gradient is None else _each(parts(variable), gradient, partial(_divided, by=scale))
        for variable, gradient in zip(parameters, gradients, strict=True)
    ]
    number = apply(optimizer.inner_optimizer, plain, parameters, learning_rate)
    steps = tf.convert_to_tensor(optimizer.step_counter.value.assign_add(1, read_value=True))
    grown = steps >= optimizer.dynamic_growth_steps
    optimizer.dynamic_scale.value.assign(tf.where(grown, scale * 2.0, scale))
    optimizer.step_counter.value.assign(tf.where(grown, tf.zeros_like(steps), steps))
    return number


def _lower_scale(optimizer: keras.optimizers.LossScaleOptimizer) -> tf.Tensor:
    optimizer.dynamic_scale.value.assign(tf.convert_to_tensor(optimizer.dynamic_scale.value) * 0.5)
    optimizer.step_counter.value.assign(0)
    return tf.identity(tf.convert_to_tensor(iterations(innermost(optimizer)).value))
