"""Keras's update rules as TensorFlow's fused kernels, where these compute the same.

Keras writes an update as a dozen elementwise operations, each of which passes over the variable once. TensorFlow has
one kernel for each of the common rules, which passes over it once in all, and where the variable lives. Only
`update_step` is replaced: clipping, weight decay, averages, constraints and everything else around it stays Keras's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

Kernel = Callable[[Any, Any, tf.Tensor, tf.Tensor], Any]
"""(optimizer, variable, gradient, learning rate) → the operation that updates the variable and its slots."""


def _sgd(optimizer: Any, variable: Any, gradient: tf.Tensor, rate: tf.Tensor) -> Any:
    """Without momentum w ← w − η·g; with momentum μ: a ← μ·a − η·g, w ← w + a, or w ← w + μ·a − η·g by Nesterov."""
    if not optimizer.momentum:
        return tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
    accumulated = _slot(optimizer, optimizer.momentums, variable)
    return tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=accumulated.handle,
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, rate.dtype),
        use_nesterov=optimizer.nesterov,
    )


def _adam(optimizer: Any, variable: Any, gradient: tf.Tensor, rate: tf.Tensor) -> Any:
    """Kingma and Ba, Adam (2015), the efficient form at the end of section 2: w − η·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v+ε)."""
    dtype = rate.dtype
    number = tf.cast(tf.convert_to_tensor(optimizer.iterations), dtype) + 1
    beta_1, beta_2 = tf.cast(optimizer.beta_1, dtype), tf.cast(optimizer.beta_2, dtype)
    return tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=_slot(optimizer, optimizer._momentums, variable).handle,
        v=_slot(optimizer, optimizer._velocities, variable).handle,
        beta1_power=tf.pow(beta_1, number),
        beta2_power=tf.pow(beta_2, number),
        lr=rate,
        beta1=beta_1,
        beta2=beta_2,
        epsilon=tf.cast(optimizer.epsilon, dtype),
        grad=gradient,
    )


def _adadelta(optimizer: Any, variable: Any, gradient: tf.Tensor, rate: tf.Tensor) -> Any:
    """Zeiler, ADADELTA (2012), algorithm 1, times the learning rate."""
    return tf.raw_ops.ResourceApplyAdadelta(
        var=variable.handle,
        accum=_slot(optimizer, optimizer._accumulated_grads, variable).handle,
        accum_update=_slot(optimizer, optimizer._accumulated_delta_vars, variable).handle,
        lr=rate,
        rho=tf.cast(optimizer.rho, rate.dtype),
        epsilon=tf.cast(optimizer.epsilon, rate.dtype),
        grad=gradient,
    )


_KERNELS: dict[type, Kernel] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adadelta: _adadelta,
}


def kernel_of(optimizer: keras.optimizers.Optimizer) -> Kernel | None:
    """The kernel that computes what an optimizer's `update_step` does; None where only Keras's own code does."""
    if getattr(optimizer, "amsgrad", False):
        return None
    return _KERNELS.get(type(optimizer))


@contextlib.contextmanager
def fused(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within it, Keras's `apply` updates by a fused kernel, if there is one for the optimizer."""
    kernel = kernel_of(optimizer)
    if kernel is None:
        yield
        return
    by_keras = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            by_keras(gradient, variable, learning_rate)
            return
        stored = _stored(variable)
        kernel(
            optimizer,
            stored,
            tf.cast(gradient, stored.dtype),
            tf.cast(tf.convert_to_tensor(learning_rate), stored.dtype),
        )

    vars(optimizer)["update_step"] = update_step  # setattr would have Keras track it
    try:
        yield
    finally:
        del vars(optimizer)["update_step"]


def _slot(optimizer: Any, slots: list[Any], variable: Any) -> Any:
    return _stored(slots[optimizer._get_variable_index(variable)])


def _stored(variable: Any) -> Any:
    """TensorFlow's variable below a Keras one."""
    return variable.value if isinstance(variable, keras.Variable) else variable
