"""The updates of Keras's optimizers: one function for each, by TensorFlow's fused kernels where they have its formula.

A function takes an `Update`: a variable with its slots, all of it or some rows. Where TensorFlow has no kernel, the
function uses a few operations that compute Keras's formula. In the formulas, w is the variable, g the gradient, η the
learning rate, and t the number of the update, counted from 1.

A bound in a docstring is the largest difference from Keras's own update after 50 updates, for the variable and its
slots. It is relative for values above 1, and absolute below.

To add an optimizer, write its function here, with the paper and the bound, and add a row to `registry.KERNELS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.train.tf_compat.control_flow import made_once
from tfdist_cli.train.variables.rows import assign_rows, rows_of


@dataclass(frozen=True)
class Update:
    """One update of a variable or of a shard of it.

    Attributes:
        optimizer: the optimizer, with its hyperparameters.
        variable: TensorFlow's variable.
        slots: the slots of the variable, each of its shape, in the order of the optimizer's row in `registry.KERNELS`.
        gradient: of the variable's type; of its shape, or (n, …) if `rows` is given.
        learning_rate: a scalar of the variable's type.
        iterations: the number of updates before this one, an int64 scalar.
        rows: (n,), the rows to update, each at most once; None for all.
        terms: like `gradient`, the sum of the squares of the terms that it is the sum of; for Adamax, the sum of their
            sizes. None: it is one term. See `registry.Kernel.terms`.
    """

    optimizer: Any
    variable: Any
    slots: Sequence[Any]
    gradient: tf.Tensor
    learning_rate: tf.Tensor
    iterations: tf.Tensor
    rows: tf.Tensor | None = None
    terms: tf.Tensor | None = None

    @property
    def squares(self) -> tf.Tensor:
        """The sum of the squares of the terms."""
        return tf.square(self.gradient) if self.terms is None else self.terms

    def scalar(self, value: float) -> tf.Tensor:
        """Converts a number to the variable's type; once for all variables on a device."""
        return self._once("scalar", value, lambda: tf.convert_to_tensor(value, self.variable.dtype))

    def cast(self, value: Any) -> tf.Tensor:
        """Casts a number to the variable's type; Python's numbers by way of float32, as Keras does in some formulas."""
        return tf.cast(value, self.variable.dtype)

    def power(self, beta: float) -> tf.Tensor:
        """Returns βᵗ; computed once for all variables on a device."""
        return self._once("power", beta, lambda: tf.pow(self.cast(beta), self.cast(self.iterations + 1)))

    def _once(self, kind: str, value: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        if not isinstance(value, (int, float)):  # a tensor or a variable, which cannot be compared by value
            return make()
        iterations = self.iterations.ref() if kind == "power" else None
        return made_once((kind, value, iterations, self.variable.dtype, self.variable.device), make)

    def run(self, kernel: Callable[..., Any], slots: dict[str, Any], **arguments: Any) -> Any:
        """Calls a kernel with the variable, the slots, the gradient, and the rows if there are any.

        Args:
            kernel: a function of `tf.raw_ops`, for the whole variable or for rows.
            slots: the slots by the names of the kernel's arguments.
            **arguments: the other arguments.
        """
        handles = {name: slot.handle for name, slot in slots.items()}
        if self.rows is not None:
            arguments["indices"] = self.rows
        return kernel(
            var=self.variable.handle, grad=self.gradient, use_locking=self.rows is None, **handles, **arguments
        )

    def read(self, slot: int) -> tf.Tensor:
        """Reads a slot, or its rows. What is read may change when the slot is written, see `variable_at`.

        Args:
            slot: the index of the slot in `slots`.
        """
        stored = self.slots[slot]
        return tf.convert_to_tensor(stored) if self.rows is None else rows_of(stored, self.rows)

    def write(self, slot: int, value: tf.Tensor) -> Any:
        """Assigns a slot, or its rows.

        Args:
            slot: the index of the slot in `slots`.
            value: of the shape of `gradient`.
        """
        stored = self.slots[slot]
        if self.rows is None:
            return stored.assign(value, read_value=False)
        return assign_rows(stored, self.rows, value)

    def descend(self, alpha: tf.Tensor, delta: tf.Tensor) -> Any:
        """Subtracts alpha·delta from the variable, or from its rows."""
        if self.rows is None:
            return tf.raw_ops.ResourceApplyGradientDescent(
                var=self.variable.handle, alpha=alpha, delta=delta, use_locking=True
            )
        # To read the rows and assign them takes a fifth of the time of ResourceScatterSub if the rows are far apart.
        change = tf.multiply(delta, alpha)
        with tf.control_dependencies([change]):
            rows = rows_of(self.variable, self.rows)
        return assign_rows(self.variable, self.rows, rows - change)


def sgd(update: Update) -> Any:
    """SGD: w ← w − η·g. With momentum μ, a ← μ·a − η·g and w ← w + a; with Nesterov momentum w ← w + μ·a − η·g.

    Nesterov momentum as in Sutskever et al., On the Importance of Initialization and Momentum in Deep Learning (2013).
    Bound: 1e-6 in float32, 1e-12 in float64.
    """
    if not update.optimizer.momentum:
        return update.descend(update.learning_rate, update.gradient)
    raw = tf.raw_ops
    return update.run(
        raw.ResourceApplyKerasMomentum if update.rows is None else raw.ResourceSparseApplyKerasMomentum,
        {"accum": update.slots[0]},
        lr=update.learning_rate,
        momentum=update.cast(update.optimizer.momentum),
        use_nesterov=update.optimizer.nesterov,
    )


def adam(update: Update) -> Any:
    """Kingma and Ba, Adam (2015), the efficient form at the end of section 2: w − η·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v+ε).

    With `amsgrad` (Reddi et al., On the Convergence of Adam and Beyond, 2018), v is its largest value so far. There is
    no kernel for rows. If the sum of squares is given, v is computed before; with β₂ = 1, the kernel keeps it.

    Bound: 1e-6 in float32, 1e-12 in float64. With β₂ = 0.999 it is 1e-5 in float32: the kernel computes 1 − β₂ in the
    variable's type, which gives 0.00099999.
    """
    if update.rows is not None:
        return _adam_rows(update)
    optimizer = update.optimizer
    if update.terms is not None:
        change = (update.terms - update.read(1)) * (1 - optimizer.beta_2)
        added = update.slots[1].assign_add(change, read_value=False)
        with tf.control_dependencies([added]):
            return _adam_by_kernel(update, update.scalar(1.0))
    return _adam_by_kernel(update, update.scalar(optimizer.beta_2))


def _adam_by_kernel(update: Update, beta_2: tf.Tensor) -> Any:
    optimizer = update.optimizer
    names = ("m", "v", "vhat") if optimizer.amsgrad else ("m", "v")
    raw = tf.raw_ops
    return update.run(
        raw.ResourceApplyAdamWithAmsgrad if optimizer.amsgrad else raw.ResourceApplyAdam,
        dict(zip(names, update.slots, strict=True)),
        beta1_power=update.power(optimizer.beta_1),
        beta2_power=update.power(optimizer.beta_2),
        lr=update.learning_rate,
        beta1=update.scalar(optimizer.beta_1),
        beta2=beta_2,
        epsilon=update.scalar(optimizer.epsilon),
    )


def _adam_rows(update: Update) -> Any:
    optimizer, gradient = update.optimizer, update.gradient
    first, second = update.read(0), update.read(1)
    first += (gradient - first) * (1 - optimizer.beta_1)
    second += (update.squares - second) * (1 - optimizer.beta_2)
    written = [update.write(0, first), update.write(1, second)]
    if optimizer.amsgrad:
        second = tf.maximum(update.read(2), second)
        written.append(update.write(2, second))
    alpha = update.learning_rate * tf.sqrt(1 - update.power(optimizer.beta_2)) / (1 - update.power(optimizer.beta_1))
    return tf.group(*written, update.descend(alpha, first / (tf.sqrt(second) + optimizer.epsilon)))


def adagrad(update: Update) -> Any:
    """Duchi et al., Adaptive Subgradient Methods (2011): a ← a + g², w ← w − η·g/√(a+ε).

    The kernel divides by √a + δ. With δ = √(a₀+ε) − √a₀, where a₀ is the initial accumulator value, both divisors are
    equal at a₀ and differ by at most the fraction ε/(8·a₀) above. The kernel is used if this fraction is within two
    units in the last place of float32, as with Keras's defaults. Rows are updated by operations, which take a third of
    the kernel's time.

    Bound: 1e-6 in float32, 1e-12 in float64.
    """
    start, epsilon = update.optimizer.initial_accumulator_value, update.optimizer.epsilon
    by_rows = update.rows is not None or update.terms is not None
    if by_rows or update.variable.dtype == tf.float64 or epsilon > 8 * start * 2.0**-22:
        return _adagrad_by_operations(update)
    return update.run(
        tf.raw_ops.ResourceApplyAdagradV2,
        {"accum": update.slots[0]},
        lr=update.learning_rate,
        epsilon=update.scalar(math.sqrt(start + epsilon) - math.sqrt(start)),
    )


def _adagrad_by_operations(update: Update) -> Any:
    """Runs one operation after another: to wake a second thread costs more time than it saves."""
    square = update.squares
    with tf.control_dependencies([square]):
        accumulator = update.read(0) + square
    written = update.write(0, accumulator)
    with tf.control_dependencies([written]):
        delta = update.gradient / tf.sqrt(accumulator + update.optimizer.epsilon)
    return tf.group(written, update.descend(update.learning_rate, delta))


def rmsprop(update: Update) -> Any:
    """RMSProp (Hinton's lecture 6e, 2012): m ← μ·m + η·g/√(v+ε), w ← w − m; centered, v less the square of g's mean.

    Without momentum, Keras has no slot for m, which the kernels require. Nor do they take sums of squares. Then the
    update consists of operations.

    Bound: 1e-6 in float32, 1e-12 in float64.
    """
    optimizer, raw = update.optimizer, tf.raw_ops
    if optimizer.momentum <= 0 or update.terms is not None:
        return _rmsprop_by_operations(update)
    slots = dict(zip(("ms", "mom", "mg"), update.slots, strict=False))
    if optimizer.centered:
        whole, rows = raw.ResourceApplyCenteredRMSProp, raw.ResourceSparseApplyCenteredRMSProp
    else:
        whole, rows = raw.ResourceApplyRMSProp, raw.ResourceSparseApplyRMSProp
    return update.run(
        whole if update.rows is None else rows,
        slots,
        lr=update.learning_rate,
        rho=update.scalar(optimizer.rho),
        momentum=update.scalar(optimizer.momentum),
        epsilon=update.scalar(optimizer.epsilon),
    )


def _rmsprop_by_operations(update: Update) -> Any:
    optimizer, gradient = update.optimizer, update.gradient
    velocity = optimizer.rho * update.read(0) + (1 - optimizer.rho) * update.squares
    written = [update.write(0, velocity)]
    if optimizer.centered:
        index = len(update.slots) - 1
        mean = optimizer.rho * update.read(index) + (1 - optimizer.rho) * gradient
        written.append(update.write(index, mean))
        velocity -= tf.square(mean)
    delta = gradient / tf.sqrt(velocity + optimizer.epsilon)
    if optimizer.momentum <= 0:
        return tf.group(*written, update.descend(update.learning_rate, delta))
    momentum = optimizer.momentum * update.read(1) + update.learning_rate * delta
    return tf.group(*written, update.write(1, momentum), update.descend(update.scalar(1.0), momentum))


def adadelta(update: Update) -> Any:
    """Zeiler, ADADELTA (2012), algorithm 1, times the learning rate.

    Bound: 1e-6 in float32, 1e-12 in float64.
    """
    optimizer, raw = update.optimizer, tf.raw_ops
    if update.terms is not None:
        return _adadelta_by_operations(update)
    return update.run(
        raw.ResourceApplyAdadelta if update.rows is None else raw.ResourceSparseApplyAdadelta,
        dict(zip(("accum", "accum_update"), update.slots, strict=True)),
        lr=update.learning_rate,
        rho=update.scalar(optimizer.rho),
        epsilon=update.scalar(optimizer.epsilon),
    )


def _adadelta_by_operations(update: Update) -> Any:
    rho, epsilon = update.optimizer.rho, update.optimizer.epsilon
    squares = rho * update.read(0) + (1 - rho) * update.squares
    before = update.read(1)
    factor = (before + epsilon) / (squares + epsilon)  # Keras squares the change by each term, too
    written = [update.write(0, squares), update.write(1, rho * before + (1 - rho) * factor * update.squares)]
    return tf.group(*written, update.descend(update.learning_rate, update.gradient * tf.sqrt(factor)))


def ftrl(update: Update) -> Any:
    """McMahan et al., Ad Click Prediction (2013), algorithm 1; Keras adds its β to the L2 regularization.

    Bound: 1e-6 in float32, 1e-12 in float64.
    """
    optimizer, raw = update.optimizer, tf.raw_ops
    if update.terms is not None:
        return _ftrl_by_operations(update)
    return update.run(
        raw.ResourceApplyFtrlV2 if update.rows is None else raw.ResourceSparseApplyFtrlV2,
        dict(zip(("accum", "linear"), update.slots, strict=True)),
        lr=update.learning_rate,
        l1=update.scalar(optimizer.l1_regularization_strength),
        l2=optimizer.l2_regularization_strength + optimizer.beta / (2 * update.learning_rate),
        l2_shrinkage=update.scalar(optimizer.l2_shrinkage_regularization_strength),
        lr_power=update.scalar(optimizer.learning_rate_power),
    )


def _ftrl_by_operations(update: Update) -> Any:
    optimizer, rate = update.optimizer, update.learning_rate
    power, l1 = -optimizer.learning_rate_power, optimizer.l1_regularization_strength
    value = tf.convert_to_tensor(update.variable) if update.rows is None else rows_of(update.variable, update.rows)
    before, linear = update.read(0), update.read(1)
    squares = before + update.squares
    shrunk = update.gradient + 2 * optimizer.l2_shrinkage_regularization_strength * value
    linear += shrunk - (tf.pow(squares, power) - tf.pow(before, power)) / rate * value
    quadratic = tf.pow(squares, power) / rate + 2 * (optimizer.l2_regularization_strength + optimizer.beta / (2 * rate))
    changed = (tf.clip_by_value(linear, -l1, l1) - linear) / quadratic - value
    with tf.control_dependencies([linear]):
        written = update.write(0, squares)
    return tf.group(written, update.write(1, linear), update.descend(update.scalar(-1.0), changed))


def adamax(update: Update) -> Any:
    """Kingma and Ba, Adam (2015), algorithm 2, with ε: w ← w − η/(1−β₁ᵗ)·m/(u+ε).

    There is no kernel for rows, nor for sums of sizes.

    Bound: 1e-6 in float32, 1e-12 in float64. With β₂ = 0.999 it is 1e-5 in float32.
    """
    if update.rows is not None or update.terms is not None:
        return _adamax_by_operations(update)
    optimizer = update.optimizer
    return update.run(
        tf.raw_ops.ResourceApplyAdaMax,
        dict(zip(("m", "v"), update.slots, strict=True)),
        beta1_power=update.power(optimizer.beta_1),
        lr=update.learning_rate,
        beta1=update.scalar(optimizer.beta_1),
        beta2=update.scalar(optimizer.beta_2),
        epsilon=update.scalar(optimizer.epsilon),
    )


def _adamax_by_operations(update: Update) -> Any:
    optimizer, gradient = update.optimizer, update.gradient
    mean, norm = update.read(0), update.read(1)
    mean += (gradient - mean) * (1 - optimizer.beta_1)
    size = tf.abs(gradient) if update.terms is None else update.terms
    norm = tf.maximum(optimizer.beta_2 * norm, size)
    alpha = update.learning_rate / (1 - update.power(optimizer.beta_1))
    return tf.group(
        update.write(0, mean), update.write(1, norm), update.descend(alpha, mean / (norm + optimizer.epsilon))
    )


def lion(update: Update) -> Any:
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023): w ← w − η·sign(β₁·m+(1−β₁)·g).

    There is no kernel for the formula. Bound: 1e-6 in float32, 1e-12 in float64.
    """
    beta_1, beta_2 = update.cast(update.optimizer.beta_1), update.cast(update.optimizer.beta_2)
    momentum, gradient = update.read(0), update.gradient
    direction = tf.sign(momentum * beta_1 + gradient * (1 - beta_1))
    with tf.control_dependencies([direction]):
        written = update.write(0, momentum * beta_2 + gradient * (1 - beta_2))
    return tf.group(written, update.descend(update.learning_rate, direction))


def decay_weights(optimizer: Any, variable: Any, learning_rate: tf.Tensor, rows: tf.Tensor | None = None) -> Any:
    """Decoupled weight decay before an update: w ← w − η·λ·w (Loshchilov and Hutter, 2019, as Keras implements it).

    Bound: 1e-7 in float32 and float64.

    Args:
        optimizer: its `weight_decay` is λ, not None.
        variable: TensorFlow's variable, or a shard of it.
        learning_rate: η, a scalar.
        rows: (n,), the rows that decay, each at most once; None for all.

    Returns:
        The operation, on the variable's device.
    """
    with tf.device(variable.device):
        values = None if rows is None else rows_of(variable, rows)
        rate = tf.cast(optimizer.weight_decay, variable.dtype) * tf.cast(learning_rate, variable.dtype)
        if values is None:
            return variable.assign_sub(variable * rate, read_value=False)
        return tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=rows, updates=values * rate)
