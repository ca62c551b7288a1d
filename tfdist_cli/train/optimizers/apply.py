"""Applies gradients with the model's own optimizer; each update increments `iterations` exactly once.

Keras increments `iterations` by reading, adding and assigning, which loses counts when several workers update at the
same time. Here the increment is one atomic operation. Its result is the number of the update, which the optimizer's
formula and its learning-rate schedule use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.optimizers.kernels import decay_weights
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import (
    FusedUpdate,
    decays,
    fused,
    fused_update_of,
    row_lock,
    terms_of,
    update_lock,
    why_no_kernel,
)
from tfdist_cli.train.optimizers.terms import SQUARES, SummedTerms, Terms
from tfdist_cli.train.optimizers.update_numbers import SentNumbers, UpdateCounts, UpdateNumbers, counted
from tfdist_cli.train.tf_compat import keras_optimizer as compat
from tfdist_cli.train.tf_compat.patching import original, replaced
from tfdist_cli.train.tf_compat.variables import Read
from tfdist_cli.train.variables.changed_rows import mark_all, marked, marks_of
from tfdist_cli.train.variables.sharding import Gradient, parts

_MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())
"""Keras's optimizer that assigns parameters to several optimizers; older versions do not have it."""
_LOSS_SCALE = "dynamic_scale"
"""The attribute of a `LossScaleOptimizer` that is the scale."""


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    rate_scaling: RateScaling | None = None,
    by_rows: Sequence[keras.Variable] | None = None,
    counts: UpdateCounts | None = None,
) -> tf.Tensor:
    """Updates parameters on the devices that store them.

    Args:
        optimizer: the optimizer, built for the parameters. One that scales the loss (`mixed_float16`) divides the
            gradients by its scale, and skips an update whose gradients are not finite.
        gradients: one per parameter, each as a list by shard; None for a parameter without a gradient. `SummedTerms`
            only of the parameters that `terms_taken` returns.
        parameters: the variables to update.
        rate_scaling: scales the optimizer's learning rate.
        by_rows: given if a row may occur several times in a sparse gradient, which is then applied as Keras does: the
            parameters of which an update changes only such rows, see `changed_by_rows`. None: each row occurs once.
        counts: given if each device counts its own updates; None sends the number of the update to all devices. It is
            not used by optimizers that consist of others, nor for Keras's own operations.

    Returns:
        The number of updates before this one, int64, shape (); also for a skipped update. Without parameters there is
        no update, as in Keras.
    """
    if not parameters:
        return tf.identity(tf.convert_to_tensor(compat.iterations(innermost(optimizer)).value))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        present = [part for gradient in gradients if gradient is not None for part in gradient]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(part))) for part in present])
        return tf.cond(
            finite,
            lambda: _apply_unscaled(optimizer, gradients, parameters, rate_scaling, by_rows),
            lambda: _lower_scale(optimizer),
        )
    if isinstance(optimizer, _MULTI_OPTIMIZER):
        return _apply_each(optimizer, gradients, parameters, rate_scaling, by_rows)
    if by_rows is not None and optimizer.loss_scale_factor is not None:  # Keras cannot divide rows by it
        gradients = [each and [_dense(part) for part in each] for each in gradients]
    sparse = any(isinstance(part, tf.IndexedSlices) for each in gradients for part in each or ())
    by_keras = _why_by_keras(optimizer, parameters) or (sparse and by_rows is not None)
    update = None if by_keras else fused_update_of(optimizer)
    counter = compat.iterations(optimizer).value
    awaited = _awaited(counter.device, gradients, parameters)
    learning_rate, iterations = counted(optimizer, counter, awaited[: None if update is None else 1], rate_scaling)
    if update is None:
        run = partial(_apply_by_keras, optimizer, gradients, parameters, iterations, learning_rate, by_rows or ())
        if by_rows is None:
            update_lock(counter.device, [iterations, learning_rate], run)
        else:
            run()
    else:
        stored = [StoredParameter.of(variable, update.slot_variables(variable)) for variable in parameters]
        numbers: UpdateNumbers = SentNumbers(learning_rate, iterations)
        if counts is not None:
            numbers = counts.numbers(
                learning_rate, iterations, rate_scaling, lambda device: _awaited(device, gradients, parameters)[:1]
            )
        apply_fused(update, gradients, stored, numbers)
    return iterations


def apply_on_device(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[StoredParameter],
    numbers: tuple[tf.Tensor, tf.Tensor],
) -> None:
    """Makes the part of an update that is on one device, where it is called, see `is_divided_by_devices`.

    Args:
        optimizer: the optimizer, built for the parameters.
        gradients: as for `apply`; None for a parameter that another device stores.
        parameters: the parameters, see `stored_parameters`.
        numbers: the learning rate, shape (), and the number of updates before this one, int64, shape ().
    """
    apply_fused(_kernel_of(optimizer), gradients, parameters, _SameNumbers(*numbers))


def stored_parameters(
    optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]
) -> list[StoredParameter]:
    """Returns parameters with the slots that an optimizer, which has a kernel, updates."""
    update = _kernel_of(optimizer)
    return [StoredParameter.of(variable, update.slot_variables(variable)) for variable in parameters]


def _kernel_of(optimizer: keras.optimizers.Optimizer) -> FusedUpdate:
    update = fused_update_of(optimizer)
    if update is None:
        raise ValueError(f"{optimizer.name} has no kernel")
    return update


def is_divided_by_devices(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> bool:
    """Whether each device can make its part of an update alone: nothing of it depends on all gradients.

    Args:
        optimizer: the optimizer, built.
        parameters: the variables that it updates, none of which is sharded.
    """
    if optimizer is not innermost(optimizer) or isinstance(optimizer, _MULTI_OPTIMIZER) or optimizer.global_clipnorm:
        return False
    return fused_update_of(optimizer) is not None and not _why_by_keras(optimizer, parameters)


def is_elementwise(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> bool:
    """Whether an update of each value is the same function of its gradient and its slots, for all values.

    Args:
        optimizer: the optimizer, built.
        parameters: the variables that it updates, none of which is sharded.
    """
    alike = len({decays(optimizer, variable) for variable in parameters}) == 1
    return is_divided_by_devices(optimizer, parameters) and not optimizer.clipnorm and alike


@dataclass(frozen=True)
class _SameNumbers:
    """Numbers of an update that has one device."""

    learning_rate: tf.Tensor
    iterations: tf.Tensor

    def on(self, device: str) -> tuple[tf.Tensor, tf.Tensor]:  # noqa: ARG002 there is one
        """See `UpdateNumbers.on`."""
        return self.learning_rate, self.iterations


def _apply_each(
    optimizer: Any,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    rate_scaling: RateScaling | None,
    by_rows: Sequence[keras.Variable] | None,
) -> tf.Tensor:
    """Applies the gradients with each optimizer of a `MultiOptimizer`, which counts its own updates as well."""
    for inner, indices in _parameters_by_optimizer(optimizer, parameters):
        own = [gradients[index] for index in indices], [parameters[index] for index in indices]
        apply(inner, *own, rate_scaling, by_rows)
    counter = compat.iterations(optimizer).value
    with tf.device(counter.device), tf.control_dependencies(_awaited(counter.device, gradients, parameters)[:1]):
        return counter.assign_add(1, read_value=True) - 1


def _parameters_by_optimizer(optimizer: Any, parameters: Sequence[keras.Variable]) -> list[tuple[Any, list[int]]]:
    """Returns the optimizers that update some parameters, each with the indices of its parameters."""
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, _MULTI_OPTIMIZER):
        return [(optimizer, list(range(len(parameters))))]
    numbers = [compat.inner_index_of(optimizer, variable) for variable in parameters]
    each = [[index for index, own in enumerate(numbers) if own == n] for n in range(len(optimizer.optimizers))]
    return [(inner, indices) for inner, indices in zip(optimizer.optimizers, each, strict=True) if indices]


def _awaited(device: str, gradients: Sequence[Gradient | None], parameters: Sequence[keras.Variable]) -> list[Any]:
    """Returns the gradients by which an update waits before it is counted.

    Without this, a function of several steps would count all of them at its start. The first tensor of the result is
    enough for that; it is on the counter's device if any gradient is. But Keras's code may apply weight decay as
    soon as the learning rate is known, while a worker still reads the parameter: there, all of them are awaited.
    """
    found = [
        (shard.device != device, _values(part))
        for variable, gradient in zip(parameters, gradients, strict=True)
        for shard, part in zip(parts(variable), gradient or [], strict=bool(gradient))
    ]
    return [values for _, values in sorted(found, key=lambda each: each[0])]


def supports_sparse_updates(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> bool:
    """Whether an optimizer can update some rows of a parameter without touching the others."""
    return all(
        fused_update_of(inner) is not None and not _why_by_keras(inner, [parameters[index] for index in indices])
        for inner, indices in _parameters_by_optimizer(optimizer, parameters)
    )


def changed_by_rows(
    optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Returns the parameters of which an update changes only the rows whose gradient is not 0, as Keras's does.

    Other optimizers also decay the momentum of all rows, say, or the norm of all gradients scales the update.

    Args:
        optimizer: the optimizer, built.
        parameters: the variables that it updates.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return []
    found = []
    for inner, indices in _parameters_by_optimizer(optimizer, parameters):
        update = fused_update_of(inner)
        clips = inner.clipnorm or inner.clipvalue or inner.global_clipnorm or inner.loss_scale_factor
        if update is None or clips or not update.kernel.leaves_other_rows(inner):
            continue
        own = [parameters[index] for index in indices]
        found += [each for each in own if not (_why_by_keras(inner, [each]) or decays(inner, each))]
    return found


def terms_taken(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> dict[int, Terms]:
    """Returns what updates take of each term of a gradient, beside the sum of the terms, as Keras's updates do.

    A gradient has terms if a batch looks up a row several times. Keras sums them before anything else if it accumulates
    gradients; the norms that it clips by are those of all terms.

    Args:
        optimizer: the optimizer, built.
        parameters: the variables that it updates.

    Returns:
        For the indices of parameters; the others need the sum alone.
    """
    found: dict[int, Terms] = {}
    for inner, indices in _parameters_by_optimizer(optimizer, parameters):
        if inner.gradient_accumulation_steps or inner.loss_scale_factor:  # Keras cannot divide rows by such a factor
            continue
        taken = SQUARES if inner.clipnorm or inner.global_clipnorm else terms_of(inner)
        if taken is not None:
            found |= dict.fromkeys(indices, taken)
    return found


def takes_sums_of_terms(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether `fused` updates take sums of terms: nothing in Keras's `apply` changes the gradients before."""
    inner = leaf_optimizers(optimizer)
    changes = any(each.clipnorm or each.global_clipnorm or each.clipvalue for each in inner)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return not (changes or scales) and all(fused_update_of(each) is not None for each in inner)


def mark_changes(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], parameters: Sequence[keras.Variable]
) -> None:
    """Marks the rows that an update has changed in tables that record it.

    Args:
        optimizer: the optimizer that has applied the gradients.
        gradients: one per parameter: a tensor, a `tf.IndexedSlices`, or None.
        parameters: the variables, not sharded.
    """
    tables = [
        (variable, gradient, marks)
        for variable, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None and (marks := marks_of(parts(variable)[0])) is not None
    ]
    by_rows = {id(variable) for variable in changed_by_rows(optimizer, parameters)} if tables else set()
    for variable, gradient, marks in tables:
        if isinstance(gradient, tf.IndexedSlices) and id(variable) in by_rows:
            marked(parts(variable)[0], gradient.indices, None)
        else:
            mark_all(marks)


def why_not_fused(optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]) -> str | None:
    """Returns the reason why Keras's own operations compute the updates, for messages; None if kernels compute them."""
    for inner, indices in _parameters_by_optimizer(optimizer, parameters):
        own = [parameters[index] for index in indices]
        reason = why_no_kernel(inner) if fused_update_of(inner) is None else _why_by_keras(inner, own)
        if reason:
            return reason
    return None


def _why_by_keras(optimizer: Any, parameters: Sequence[keras.Variable]) -> str | None:
    """Returns the part of an update that only Keras's own `apply` does; None if there is none."""
    if optimizer.use_ema:
        return "use_ema keeps moving averages"
    if optimizer.gradient_accumulation_steps:
        return "gradient_accumulation_steps accumulates gradients"
    for variable in parameters:
        if variable.constraint is not None:
            return f"{variable.path} has a constraint"
        if getattr(variable, "overwrite_with_gradient", False):
            return f"{variable.path} is overwritten with its gradient"
    return None


@dataclass(frozen=True)
class StoredParameter:
    """A parameter with the TensorFlow variables that store it and its slots.

    Args:
        variable: the Keras variable, which decides whether weight decay applies.
        shards: the variables that store it.
        slots: for each slot the variables that store it, in the order of the optimizer's fused update.
    """

    variable: keras.Variable
    shards: list[Any]
    slots: list[list[Any]]

    @classmethod
    def of(cls, variable: keras.Variable, slots: Sequence[keras.Variable]) -> StoredParameter:
        """Returns the parameter as the Keras variables store it."""
        return cls(variable, parts(variable), [parts(slot) for slot in slots])


def apply_fused(
    update: FusedUpdate,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[StoredParameter],
    numbers: UpdateNumbers,
) -> None:
    """Applies a fused update to parameters, each shard on its own device.

    Args:
        update: the optimizer's fused update.
        gradients: one per parameter, each as a list by shard; None for a parameter without a gradient.
        parameters: the parameters.
        numbers: the learning rate and the number of the update.
    """
    optimizer = update.optimizer
    present = [(stored, gradient) for stored, gradient in zip(parameters, gradients, strict=True) if gradient]
    if optimizer.loss_scale_factor is not None:
        by = optimizer.loss_scale_factor
        present = [(stored, _divided(stored.shards, gradient, by)) for stored, gradient in present]
    locked: dict[str, list[tuple[Any, Callable[[], Any]]]] = {}
    for stored, gradient in _clipped(optimizer, present):
        decaying = decays(optimizer, stored.variable)
        for index, (shard, part) in enumerate(zip(stored.shards, gradient, strict=True)):
            slots = [slot[index] for slot in stored.slots]
            learning_rate, iterations = numbers.on(shard.device)
            with tf.device(shard.device):
                rate = tf.cast(learning_rate, shard.dtype)
                values, terms = tf.cast(_values(part), shard.dtype), _terms(update, part)
                rows = _rows(part)
                if rows is not None:
                    own = tf.IndexedSlices(values, rows)
                    run = partial(update.sparse, shard, slots, own, rate, iterations, decays=decaying, terms=terms)
                    locked.setdefault(shard.device, []).append(([values, rows], run))
                    continue
                with tf.control_dependencies([values]):  # until then, a worker may have to read the shard
                    before = [decay_weights(optimizer, shard, rate)] if decaying else []
                with tf.control_dependencies(before):
                    run = partial(update.dense, shard, slots, values, rate, iterations, terms)
                    if terms is None:
                        run()
                    else:  # several operations, in which another worker's update may not be lost
                        locked.setdefault(shard.device, []).append(([values, terms, *before], run))
    for device, updates in locked.items():
        row_lock(device, [tensor for own, _ in updates for tensor in own], [run for _, run in updates])


def _clipped(optimizer: Any, present: list[tuple[StoredParameter, Gradient]]) -> list[tuple[StoredParameter, Gradient]]:
    """Clips gradients as Keras does. The norm of a sharded parameter's gradient is that of all its shards."""
    if not (optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm):
        return present
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue

        def clipped(values: tf.Tensor) -> tf.Tensor:
            return tf.clip_by_value(values, -limit, limit)

        return [(stored, _mapped(stored.shards, gradient, clipped)) for stored, gradient in present]
    squares = [
        [_on_device_of(shard, _square_sum, part) for shard, part in zip(stored.shards, gradient, strict=True)]
        for stored, gradient in present
    ]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        divisors = [tf.maximum(tf.sqrt(tf.add_n(own)), optimizer.clipnorm) / optimizer.clipnorm for own in squares]
    else:
        norm = tf.sqrt(tf.add_n([square for own in squares for square in own]))
        divisors = [tf.maximum(norm, optimizer.global_clipnorm) / optimizer.global_clipnorm] * len(present)
    clipped_by_norm = [
        (stored, _divided(stored.shards, gradient, divisor))
        for (stored, gradient), divisor in zip(present, divisors, strict=True)
    ]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        return clipped_by_norm
    return [(stored, _totals(gradient)) for stored, gradient in clipped_by_norm]  # Keras sums the terms here


def _mapped(shards: Sequence[Any], gradient: Gradient, function: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    """Applies a function to the values of a gradient, each part on the device of its shard."""
    changed = []
    for shard, part in zip(shards, _totals(gradient), strict=True):
        values = _on_device_of(shard, function, _values(part))
        sparse = isinstance(part, tf.IndexedSlices)
        changed.append(tf.IndexedSlices(values, part.indices, part.dense_shape) if sparse else values)
    return changed


def _divided(shards: Sequence[Any], gradient: Gradient, by: tf.Tensor | float) -> Gradient:
    """Divides a gradient, each part on the device of its shard."""
    divided = []
    for shard, part in zip(shards, gradient, strict=True):
        with tf.device(shard.device):
            if isinstance(part, SummedTerms):
                divided.append(part.divided(by))
            else:
                divided += _mapped([shard], [part], lambda values: values / tf.cast(by, values.dtype))
    return divided


def _terms(update: FusedUpdate, part: Any) -> tf.Tensor | None:
    """Returns what an update takes of the terms of a gradient; None if it takes the sum alone."""
    return part.terms if isinstance(part, SummedTerms) and part.kind is update.kernel.terms else None


def _rows(part: Any) -> tf.Tensor | None:
    """Returns the rows of a gradient; None if it is that of a whole shard."""
    whole = part.total if isinstance(part, SummedTerms) else part
    return whole.indices if isinstance(whole, tf.IndexedSlices) else None


def _totals(gradient: Gradient) -> Gradient:
    """Returns the sums of terms."""
    return [part.total if isinstance(part, SummedTerms) else part for part in gradient]


def _square_sum(part: Any) -> tf.Tensor:
    if isinstance(part, SummedTerms) and part.kind is SQUARES:
        return tf.reduce_sum(tf.cast(part.terms, tf.float32))
    return tf.reduce_sum(tf.square(tf.cast(_values(part), tf.float32)))


def _on_device_of(shard: Any, function: Callable[[Any], tf.Tensor], part: Any) -> tf.Tensor:
    with tf.device(shard.device):
        return function(part)


def _dense(part: Any) -> tf.Tensor:
    """Returns a gradient as a tensor, on the device where it is."""
    with tf.device(_values(part).device):
        return tf.convert_to_tensor(part)


def _values(part: Any) -> tf.Tensor:
    """Returns the values of a gradient. As each row occurs once, their norm is that of the dense gradient."""
    return part.values if isinstance(part, tf.IndexedSlices | SummedTerms) else part


def _apply_by_keras(
    optimizer: Any,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    iterations: tf.Tensor,
    learning_rate: tf.Tensor,
    by_rows: Sequence[keras.Variable],
) -> None:
    whole = [each and _whole(each) for each in gradients]
    # Keras updates variables only within a replica context. There is one replica. `strategy.run` would trace it in
    # another thread, where the substituted variables are not in effect.
    replica = tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
    values = {compat.ITERATIONS: Read(iterations), compat.LEARNING_RATE: Read(learning_rate)}
    with substituted(optimizer, values), fused(optimizer, by_rows, summed=False), replica:
        optimizer.apply(whole, list(parameters))


def _whole(gradient: Gradient) -> Any:
    """Returns the gradient of a variable, whose shards are updated completely, for Keras's code."""
    if any(isinstance(part, SummedTerms) for part in gradient):
        values, terms = (tf.concat([getattr(part, each) for part in gradient], axis=0) for each in ("values", "terms"))
        return gradient[0].with_values(values, terms).repeated()
    return gradient[0] if len(gradient) == 1 else tf.concat(gradient, axis=0)


def substituted(optimizer: keras.optimizers.Optimizer, values: dict[str, Read]) -> AbstractContextManager[None]:
    """Within the context, an optimizer uses values that were read before in place of its variables.

    Args:
        optimizer: the optimizer.
        values: the values by the names of the optimizer's attributes.
    """
    return replaced(optimizer, values)


def disable_gradient_reduction(optimizer: keras.optimizers.Optimizer) -> None:
    """Stops Keras from summing gradients over replicas: engines pass gradients that are already reduced."""
    for inner in leaf_optimizers(optimizer):
        compat.disable_gradient_sums(inner)


def learning_rates(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the learning rates that are variables, which callbacks can set."""
    rates = [compat.learning_rate(inner) for inner in leaf_optimizers(optimizer)]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def leaf_optimizers(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the optimizers that compute updates: those of a `MultiOptimizer`, or the optimizer itself."""
    optimizer = innermost(optimizer)
    return list(optimizer.optimizers) if isinstance(optimizer, _MULTI_OPTIMIZER) else [optimizer]


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer within a `LossScaleOptimizer` (`mixed_float16`), or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def loss_scales(optimizers: Sequence[keras.optimizers.Optimizer]) -> list[tf.Tensor | None]:
    """Reads the scales that optimizers multiply losses by (`mixed_float16`); None for one that does not scale them."""
    found: list[tf.Tensor | None] = []
    for optimizer in optimizers:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built:
            scale = optimizer.dynamic_scale.value
            with tf.device(scale.device):
                found.append(tf.identity(scale))
        else:
            found.append(None)
    return found


@contextmanager
def fixed_loss_scales(
    optimizers: Sequence[keras.optimizers.Optimizer], scales: Sequence[tf.Tensor | None]
) -> Iterator[None]:
    """Within the context, optimizers multiply losses, and divide gradients, by scales that were read before.

    They may differ from those of now: another worker's update has changed them.
    """
    with ExitStack() as within:
        for optimizer, scale in zip(optimizers, scales, strict=True):
            if scale is not None:
                within.enter_context(substituted(optimizer, {_LOSS_SCALE: Read(scale)}))
        yield


def _apply_unscaled(
    optimizer: keras.optimizers.LossScaleOptimizer,
    gradients: Sequence[Gradient | None],
    parameters: Sequence[keras.Variable],
    rate_scaling: RateScaling | None,
    by_rows: Sequence[keras.Variable] | None,
) -> tf.Tensor:
    used = tf.convert_to_tensor(optimizer.dynamic_scale.value)
    unscaled = [
        None if gradient is None else _divided(parts(variable), gradient, used)
        for variable, gradient in zip(parameters, gradients, strict=True)
    ]
    iterations = apply(optimizer.inner_optimizer, unscaled, parameters, rate_scaling, by_rows)
    steps = tf.convert_to_tensor(optimizer.step_counter.value.assign_add(1, read_value=True))
    grows = steps >= optimizer.dynamic_growth_steps
    stored = original(optimizer, _LOSS_SCALE).value
    scale = tf.convert_to_tensor(stored)
    stored.assign(tf.where(grows, scale * 2.0, scale))
    optimizer.step_counter.value.assign(tf.where(grows, tf.zeros_like(steps), steps))
    return iterations


def _lower_scale(optimizer: keras.optimizers.LossScaleOptimizer) -> tf.Tensor:
    stored = original(optimizer, _LOSS_SCALE).value
    stored.assign(tf.convert_to_tensor(stored) * 0.5)
    optimizer.step_counter.value.assign(0)
    return tf.identity(tf.convert_to_tensor(compat.iterations(innermost(optimizer)).value))
