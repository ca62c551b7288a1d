"""The optimizers of a model with a `train_step` of its own, whose updates the engine makes.

While the step is traced, `optimizer.apply` and `apply_gradients` hand their gradients to the scope in which the model
is called (`Assignments`). If an optimizer makes the only update, at the end of the step, the engine applies the
gradients as it applies those of any model. Otherwise the engine makes each update within the step, and the rest of the
step reads the updated variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.model.assignments import Assignments, Optimizer, OptimizerUpdate
from tfdist_cli.train.tf_compat.keras_model import stateless_scope
from tfdist_cli.train.tf_compat.keras_optimizer import parameters_of
from tfdist_cli.train.tf_compat.patching import replaced


def overrides(model: keras.Model, method: str) -> bool:
    """Whether the class of a model overrides a method of `keras.Model`."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def optimizers_of(model: keras.Model) -> list[Optimizer]:
    """Returns the optimizers that are attributes of a model, also in lists and dictionaries; the compiled one first."""
    found = [model.optimizer]
    for value in vars(model).values():
        found += [each for each in _flat(value) if isinstance(each, keras.optimizers.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


@contextlib.contextmanager
def updates_handed_over(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Within the context, these optimizers hand their updates to the `Assignments` of the step that applies them."""
    with contextlib.ExitStack() as contexts:
        for optimizer in optimizers:
            contexts.enter_context(replaced(optimizer, {"apply": _Apply(optimizer)}))
        yield


class _Apply:
    """Replaces an optimizer's `apply`. Replicas of one task are traced in threads, each of which has its own scope."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        scope, optimizer = stateless_scope(), self._optimizer
        if isinstance(scope, Assignments):
            variables = parameters_of(optimizer) if trainable_variables is None else trainable_variables
            scope.apply_gradients(optimizer, grads, variables)
        else:
            type(optimizer).apply(optimizer, grads, trainable_variables)


def build_optimizers(updates: Sequence[OptimizerUpdate]) -> None:
    """Builds the optimizers of a step, each for the variables that it updates, as their first `apply` does in Keras."""
    variables: dict[int, dict[int, keras.Variable]] = {}
    for update in updates:
        variables.setdefault(id(update.optimizer), {}).update({id(each): each for each in update.variables})
    for optimizer in {id(update.optimizer): update.optimizer for update in updates}.values():
        if not optimizer.built:
            optimizer.build(list(variables[id(optimizer)].values()))


def scaled(gradient: Any, factor: Any) -> Any:
    """Multiplies a gradient, which may be None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
