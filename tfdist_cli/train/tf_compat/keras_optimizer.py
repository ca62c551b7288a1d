"""Keras's optimizers: counters, rates and slots, which they keep in private attributes."""

from __future__ import annotations

from typing import Any

import keras

LEARNING_RATE = "_learning_rate"
"""The learning rate as it was given: a variable, a schedule or a function. Seen in Keras 3.15.1. Reason: the public
`learning_rate` computes a schedule's value at the optimizer's own count. Replace with: a public attribute."""
ITERATIONS = "_iterations"
"""The variable that counts updates. Seen in Keras 3.15.1. Reason: the public `iterations` divides it by
`gradient_accumulation_steps`. Replace with: a public attribute."""


class SlotNames:
    """The attributes that hold an optimizer's slots: lists of variables, one for each parameter.

    Seen in Keras 3.15.1: these attributes. Reason: Keras's optimizers have no public slots; `SGD.momentums` is the
    exception. Replace with: public attributes.
    """

    MOMENTUMS = "_momentums"
    VELOCITIES = "_velocities"
    VELOCITY_HATS = "_velocity_hats"
    AVERAGE_GRADIENTS = "_average_gradients"
    ACCUMULATORS = "_accumulators"
    ACCUMULATED_GRADIENTS = "_accumulated_grads"
    ACCUMULATED_DELTAS = "_accumulated_delta_vars"
    ADAMAX_MEANS = "_m"
    ADAMAX_NORMS = "_u"
    LINEARS = "_linears"


def iterations(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts updates.

    Seen in Keras 3.15.1: `Optimizer._iterations`. Reason: see `ITERATIONS`. Replace with: a public attribute.
    """
    return getattr(optimizer, ITERATIONS)


def learning_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the learning rate as it was given: a variable, a schedule or a function.

    Seen in Keras 3.15.1: `Optimizer._learning_rate`. Reason: see `LEARNING_RATE`. Replace with: a public attribute.
    """
    return getattr(optimizer, LEARNING_RATE)


def index_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns a parameter's place in the optimizer's lists of slots.

    Seen in Keras 3.15.1: `Optimizer._get_variable_index`. Reason: Keras has no public slots. Replace with: a public
    method that returns a parameter's slots.
    """
    return optimizer._get_variable_index(variable)


def parameters_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that the optimizer was built for.

    Seen in Keras 3.15.1: `Optimizer._trainable_variables`. Reason: only the optimizer's own variables are public.
    Replace with: a public attribute.
    """
    return list(optimizer._trainable_variables)


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether weight decay, if there is any, applies to a parameter.

    Seen in Keras 3.15.1: `Optimizer._use_weight_decay`. Reason: `exclude_from_weight_decay` can be called in public,
    and its result not be read. Replace with: a public method.
    """
    return optimizer._use_weight_decay(variable)


def inner_index_of(optimizer: Any, variable: Any) -> int:
    """Returns which of a `MultiOptimizer`'s optimizers updates a parameter.

    Seen in Keras 3.15.1: `MultiOptimizer._var_to_optimizer_idx`, `Optimizer._var_key`. Reason: the assignment is not
    public. Replace with: a public method.
    """
    return optimizer._var_to_optimizer_idx[optimizer._var_key(variable)]


def disable_gradient_sums(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps an optimizer from summing gradients over replicas.

    Seen in Keras 3.15.1: `TFOptimizer._all_reduce_sum_gradients`. Reason: engines pass gradients that are summed
    already, and Keras has no argument for that. Replace with: such an argument of `apply`.
    """
    optimizer._all_reduce_sum_gradients = lambda pairs: pairs
