"""The formulas of update rules: each as one of TensorFlow's kernels, or by a few operations where no kernel has it.

In all of them w is the variable, g the gradient, η the learning rate, t the number of the update, counted from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Update:
    """One update of one piece: a whole variable or a shard.

    Attributes:
        optimizer: with the hyperparameters.
        variable: the piece.
        slots: the piece's slots, each of its shape.
        gradient: of the variable's type; of the piece's shape, or one entry for each of `rows`.
        rate: the learning rate, a scalar of the variable's type.
        number: how many updates came before, an int64 scalar.
        rows: the touched rows of the piece; None for all.
    """

    optimizer: Any
    variable: Any
    slots: Sequence[Any]
    gradient: tf.Tensor
    rate: tf.Tensor
    number: tf.Tensor
    rows: tf.Tensor | None = None

    def scalar(self, value: float) -> tf.Tensor:
        """A number in the variable's type."""
        return tf.convert_to_tensor(value, self.variable.dtype)

    def cast(self, value: Any) -> tf.Tensor:
        """The same by a cast, which takes Python's numbers through float32: where Keras does so, float64 must too."""
        return tf.cast(value, self.variable.dtype)

    def power(self, beta: float) -> tf.Tensor:
        """βᵗ, t the number of this update, counted from 1."""
        return tf.pow(self.cast(beta), self.cast(self.number + 1))

    def run(self, kernel: Callable[..., Any], slots: dict[str, Any], **given: Any) -> Any:
        """Calls a kernel with variable, slots and gradient, and with the rows if it is one for rows."""
        handles = {name: slot.handle for name, slot in slots.items()}
        if self.rows is not None:
            given["indices"] = self.rows
        return kernel(var=self.variable.handle, grad=self.gradient, use_locking=self.rows is None, **handles, **given)

    def read(self, place: int) -> tf.Tensor:
        """A slot's value, or its touched rows."""
        slot = self.slots[place]
        return tf.convert_to_tensor(slot) if self.rows is None else slot.sparse_read(self.rows)

    def write(self, place: int, value: tf.Tensor) -> Any:
        """Gives a slot, or its touched rows, a value."""
        slot = self.slots[place]
        if self.rows is None:
            return slot.assign(value, read_value=False)
        return self._put(slot, value)

    def descend(self, alpha: tf.Tensor, delta: tf.Tensor) -> Any:
        """Takes alpha·delta from the variable."""
        if self.rows is None:
            return tf.raw_ops.ResourceApplyGradientDescent(
                var=self.variable.handle, alpha=alpha, delta=delta, use_locking=True
            )
        # Reading rows and putting them back takes a fifth of ResourceScatterSub's time, where they are far apart.
        taken = tf.multiply(delta, alpha)
        with tf.control_dependencies([taken]):
            rows = self.variable.sparse_read(self.rows)
        return self._put(self.variable, rows - taken)

    def _put(self, variable: Any, rows: tf.Tensor) -> Any:
        return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=self.rows, updates=rows)


def descent(update: Update) -> Any:
    """Takes η·g from the variable."""
    return update.descend(update.rate, update.gradient)


def momentum(update: Update) -> Any:
    """With a ← μ·a − η·g: w ← w + a, or w ← w + μ·a − η·g by Nesterov."""
    raw = tf.raw_ops
    return update.run(
        raw.ResourceApplyKerasMomentum if update.rows is None else raw.ResourceSparseApplyKerasMomentum,
        {"accum": update.slots[0]},
        lr=update.rate,
        momentum=update.cast(update.optimizer.momentum),
        use_nesterov=update.optimizer.nesterov,
    )


def adam(update: Update) -> Any:
    """Kingma and Ba, Adam (2015), the efficient form at the end of section 2: w − η·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v+ε).

    With `amsgrad` (Reddi et al., On the Convergence of Adam and Beyond, 2018) v is the largest so far. The kernel takes
    1 − β₂ from β₂ in the variable's type: in float32 that is 0.00099999 for 0.999.
    """
    optimizer = update.optimizer
    names = ("m", "v", "vhat") if optimizer.amsgrad else ("m", "v")
    raw = tf.raw_ops
    return update.run(
        raw.ResourceApplyAdamWithAmsgrad if optimizer.amsgrad else raw.ResourceApplyAdam,
        dict(zip(names, update.slots, strict=True)),
        beta1_power=update.power(optimizer.beta_1),
        beta2_power=update.power(optimizer.beta_2),
        lr=update.rate,
        beta1=update.scalar(optimizer.beta_1),
        beta2=update.scalar(optimizer.beta_2),
        epsilon=update.scalar(optimizer.epsilon),
    )


def adam_rows(update: Update) -> Any:
    """The same by operations: there is no kernel for rows."""
    optimizer, gradient = update.optimizer, update.gradient
    first, second = update.read(0), update.read(1)
    first += (gradient - first) * (1 - optimizer.beta_1)
    second += (tf.square(gradient) - second) * (1 - optimizer.beta_2)
    written = [update.write(0, first), update.write(1, second)]
    if optimizer.amsgrad:
        second = tf.maximum(update.read(2), second)
        written.append(update.write(2, second))
    alpha = update.rate * tf.sqrt(1 - update.power(optimizer.beta_2)) / (1 - update.power(optimizer.beta_1))
    return tf.group(*written, update.descend(alpha, first / (tf.sqrt(second) + optimizer.epsilon)))


def adagrad(update: Update) -> Any:
    """Duchi et al., Adaptive Subgradient Methods (2011): with a ← a + g², w ← w − η·g/√(a+ε).

    The kernel divides by √a + δ. With δ = √(a₀+ε) − √a₀, a₀ being what the accumulator starts with, that is the same at
    a₀, and at most ε/(8·a₀) of it more above. The kernel is used where that is within two of float32's last places, as
    for Keras's defaults.
    """
    start, epsilon = update.optimizer.initial_accumulator_value, update.optimizer.epsilon
    if update.variable.dtype == tf.float64 or epsilon > 8 * start * 2.0**-22:
        return adagrad_by_operations(update)
    return update.run(
        tf.raw_ops.ResourceApplyAdagradV2,
        {"accum": update.slots[0]},
        lr=update.rate,
        epsilon=update.scalar(math.sqrt(start + epsilon) - math.sqrt(start)),
    )


def adagrad_by_operations(update: Update) -> Any:
    """The same, with Keras's ε whatever it is; of rows it takes a third of the kernel's time.

    One operation after the other: to wake a thread that does another one meanwhile costs more than it gains.
    """
    square = tf.square(update.gradient)
    with tf.control_dependencies([square]):
        accumulator = update.read(0) + square
    written = update.write(0, accumulator)
    with tf.control_dependencies([written]):
        delta = update.gradient / tf.sqrt(accumulator + update.optimizer.epsilon)
    return tf.group(written, update.descend(update.rate, delta))


def rmsprop(update: Update) -> Any:
    """RMSProp (Hinton's lecture 6e, 2012): m ← μ·m + η·g/√(v+ε), w ← w − m; centred, v less the square of g's mean."""
    optimizer, raw = update.optimizer, tf.raw_ops
    slots = dict(zip(("ms", "mom", "mg"), update.slots, strict=False))
    if optimizer.centered:
        whole, some = raw.ResourceApplyCenteredRMSProp, raw.ResourceSparseApplyCenteredRMSProp
    else:
        whole, some = raw.ResourceApplyRMSProp, raw.ResourceSparseApplyRMSProp
    return update.run(
        whole if update.rows is None else some,
        slots,
        lr=update.rate,
        rho=update.scalar(optimizer.rho),
        momentum=update.scalar(optimizer.momentum),
        epsilon=update.scalar(optimizer.epsilon),
    )


def rmsprop_without_momentum(update: Update) -> Any:
    """The same with μ = 0 by operations: the kernels want a slot for m, and Keras has none."""
    optimizer, gradient = update.optimizer, update.gradient
    velocity = optimizer.rho * update.read(0) + (1 - optimizer.rho) * tf.square(gradient)
    written = [update.write(0, velocity)]
    if optimizer.centered:
        mean = optimizer.rho * update.read(1) + (1 - optimizer.rho) * gradient
        written.append(update.write(1, mean))
        velocity -= tf.square(mean)
    return tf.group(*written, update.descend(update.rate, gradient / tf.sqrt(velocity + optimizer.epsilon)))


def adadelta(update: Update) -> Any:
    """Zeiler, ADADELTA (2012), algorithm 1, times the learning rate."""
    optimizer, raw = update.optimizer, tf.raw_ops
    return update.run(
        raw.ResourceApplyAdadelta if update.rows is None else raw.ResourceSparseApplyAdadelta,
        dict(zip(("accum", "accum_update"), update.slots, strict=True)),
        lr=update.rate,
        rho=update.scalar(optimizer.rho),
        epsilon=update.scalar(optimizer.epsilon),
    )


def ftrl(update: Update) -> Any:
    """McMahan et al., Ad Click Prediction (2013), algorithm 1, whose β Keras adds to the second regularization."""
    optimizer, raw = update.optimizer, tf.raw_ops
    return update.run(
        raw.ResourceApplyFtrlV2 if update.rows is None else raw.ResourceSparseApplyFtrlV2,
        dict(zip(("accum", "linear"), update.slots, strict=True)),
        lr=update.rate,
        l1=update.scalar(optimizer.l1_regularization_strength),
        l2=optimizer.l2_regularization_strength + optimizer.beta / (2 * update.rate),
        l2_shrinkage=update.scalar(optimizer.l2_shrinkage_regularization_strength),
        lr_power=update.scalar(optimizer.learning_rate_power),
    )


def adamax(update: Update) -> Any:
    """Kingma and Ba, Adam (2015), algorithm 2, with ε: w ← w − η/(1−β₁ᵗ)·m/(u+ε)."""
    optimizer = update.optimizer
    return update.run(
        tf.raw_ops.ResourceApplyAdaMax,
        dict(zip(("m", "v"), update.slots, strict=True)),
        beta1_power=update.power(optimizer.beta_1),
        lr=update.rate,
        beta1=update.scalar(optimizer.beta_1),
        beta2=update.scalar(optimizer.beta_2),
        epsilon=update.scalar(optimizer.epsilon),
    )


def adamax_rows(update: Update) -> Any:
    """The same by operations: there is no kernel for rows."""
    optimizer, gradient = update.optimizer, update.gradient
    mean, norm = update.read(0), update.read(1)
    mean += (gradient - mean) * (1 - optimizer.beta_1)
    norm = tf.maximum(optimizer.beta_2 * norm, tf.abs(gradient))
    alpha = update.rate / (1 - update.power(optimizer.beta_1))
    return tf.group(
        update.write(0, mean), update.write(1, norm), update.descend(alpha, mean / (norm + optimizer.epsilon))
    )


def lion(update: Update) -> Any:
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023): w ← w − η·sign(β₁·m+(1−β₁)·g).

    No kernel has it.
    """
    beta_1, beta_2 = update.cast(update.optimizer.beta_1), update.cast(update.optimizer.beta_2)
    momentum, gradient = update.read(0), update.gradient
    return tf.group(
        update.descend(update.rate, tf.sign(momentum * beta_1 + gradient * (1 - beta_1))),
        update.write(0, momentum * beta_2 + gradient * (1 - beta_2)),
    )
