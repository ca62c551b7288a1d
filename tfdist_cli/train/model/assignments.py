"""The stateless scope in which a step calls the model: variables have given values, and assignments are collected.

The updates of optimizers in a `train_step` of the model's own are collected, too; see `own_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.optimizers.apply import learning_rates
from tfdist_cli.train.tf_compat.keras_model import compiled_metrics, global_seed_generator, without_stateless_scope
from tfdist_cli.train.tf_compat.variables import WeightTensor, stored

Optimizer: TypeAlias = keras.optimizers.Optimizer
Assigned = list[tuple[keras.Variable, tf.Tensor]]
"""Parameters that a step has assigned, each with its value."""
Update = Callable[[Optimizer | None, list[Any], list[keras.Variable], Assigned], list[tf.Tensor]]
"""Assigns parameters, and then applies gradients of one replica or worker to variables by an optimizer; returns the
variables' new values. Without an optimizer it only assigns."""


@dataclass(frozen=True)
class OptimizerUpdate:
    """An update by an optimizer in a step.

    Args:
        optimizer: the optimizer.
        variables: the variables that it updates.
        gradients: their gradients, None for variables without one.
        assigned: the parameters that the step has assigned since the update before.
    """

    optimizer: Optimizer
    variables: list[keras.Variable]
    gradients: list[Any]
    assigned: list[keras.Variable]

    @property
    def given(self) -> list[keras.Variable]:
        """The variables with a gradient."""
        return [each for each, gradient in zip(self.variables, self.gradients, strict=True) if gradient is not None]


_awaited_reads: list[Sequence[Any]] = [()]
"""What steps that are traced now await before they read an optimizer's variable: of the step that began last."""


@contextlib.contextmanager
def counters_read_after(awaited: Sequence[Any]) -> Iterator[None]:
    """Within the context, a step reads the variables of its optimizers after some tensors.

    Such a variable is stored where other tasks update it. Without this, TensorFlow may read it at any time.
    """
    _awaited_reads.append(awaited)
    try:
        yield
    finally:
        _awaited_reads.pop()


def awaited_reads() -> Sequence[Any]:
    """What is awaited now before variables of optimizers are read, see `counters_read_after`."""
    return _awaited_reads[-1]


class Assignments(keras.StatelessScope):
    """Collects what a step assigns to variables.

    Args:
        values: the variables, each with the value that it has at the start of the step.
        update: makes the updates of optimizers within the step; by default, they are only collected.
        parameters: the variables among these that optimizers update. The step may assign them, too.

    Attributes:
        updates: those of optimizers, in the order of the step.
        reads_updated: whether the step reads a variable after an optimizer has updated it.
        reads_last: whether it reads one that the last update has updated, after that.
        assigns_parameters: whether it assigns a parameter.
        metrics_before: the values of the metric variables at the start of the step.
    """

    def __init__(
        self,
        values: list[tuple[keras.Variable, tf.Tensor]],
        update: Update | None = None,
        parameters: Sequence[keras.Variable] = (),
    ) -> None:
        super().__init__(state_mapping=values, collect_losses=True)
        self.updates: list[OptimizerUpdate] = []
        self.reads_updated = self.reads_last = self.assigns_parameters = False
        self.metrics_before: list[tf.Tensor] = []
        self._update = update
        self._awaited = _awaited_reads[-1]
        self._updated: set[int] = set()
        self._updated_last: set[int] = set()
        self._parameters = {id(variable) for variable in parameters}
        self._pending: dict[int, keras.Variable] = {}
        """The parameters that were assigned since the last update."""
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._assigned: dict[int, keras.Variable] = {}
        for variable, _ in values:
            self._set(variable, self.state_mapping[id(variable)])

    def _set(self, variable: keras.Variable, value: tf.Tensor) -> None:
        weight = getattr(stored(variable), "trainable", True) and value.dtype.is_floating
        self.state_mapping[id(variable)] = WeightTensor(value, variable.path) if weight else value

    def apply_gradients(self, optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Takes the place of an optimizer's `apply`.

        Args:
            optimizer: the optimizer.
            gradients: one for each variable; None for a variable without one.
            variables: the variables to update.

        Raises:
            TrainingError: the update depends on a condition, or there is no gradient.
        """
        gradients, variables = list(gradients), list(variables)
        if self._graph is not None and self._graph is not tf.compat.v1.get_default_graph():
            raise TrainingError(
                f"the train_step applies {optimizer.name!r} within a condition or a loop of TensorFlow",
                code="update-in-condition",
                hint="call optimizer.apply in each step; its gradient_accumulation_steps accumulate; "
                "Python's own `for` and `if` on numbers are allowed",
            )
        pairs = list(zip(gradients, variables, strict=True))
        if any(gradient is None and id(variable) in self._updated for gradient, variable in pairs):
            raise TrainingError(
                f"{optimizer.name!r} is to update a variable for the second time without a gradient: it was recorded "
                "before the first update",
                code="gradient-lost",
                hint="compute the loss and its gradient again after the first update, or both before it",
            )
        if not any(gradient is not None for gradient in gradients):
            raise TrainingError(
                f"the train_step applies {optimizer.name!r} without any gradient",
                code="no-gradients",
                hint="compute the loss within tf.GradientTape, from the weights that the optimizer updates",
            )
        self.updates.append(OptimizerUpdate(optimizer, variables, gradients, self.assigned))
        if self._update is not None:
            given, updated = map(list, zip(*[pair for pair in pairs if pair[0] is not None], strict=True))
            assigned = self._values_of(self.assigned)
            with without_stateless_scope():
                values = self._update(optimizer, given, updated, assigned)
            for variable, value in zip(updated, values, strict=True):
                self._set(variable, value)
            self._awaited = values if self._awaited else ()
        self._pending.clear()
        rates = {id(rate) for rate in learning_rates(optimizer)}
        self._updated_last = {id(each) for each in (*variables, *optimizer.variables)} - rates
        self._updated |= self._updated_last
        self.reads_last = False

    @property
    def assigned(self) -> list[keras.Variable]:
        """The parameters that the step has assigned since the last update."""
        return list(self._pending.values())

    def assign_parameters(self) -> None:
        """At the end of the step: assigns the parameters that it has assigned since its last update."""
        if self._update is not None and self._pending:
            assigned = self._values_of(self.assigned)
            with without_stateless_scope():
                self._update(None, [], [], assigned)

    def _values_of(self, variables: list[keras.Variable]) -> Assigned:
        return list(zip(variables, self.current(variables), strict=True))

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See `keras.StatelessScope`."""
        self.reads_updated = self.reads_updated or id(variable) in self._updated
        self.reads_last = self.reads_last or id(variable) in self._updated_last
        value = super().get_current_value(variable)
        if value is not None or not self._awaited or variable.trainable:
            return value
        with tf.control_dependencies(self._awaited):
            return tf.identity(stored(variable))

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """See `keras.StatelessScope`."""
        variable, value = update
        value = tf.convert_to_tensor(value)
        value.set_shape(variable.shape)  # the parts of a queue have lengths that only the step knows
        if id(variable) in self._parameters:
            self._assign_parameter(variable, tf.stop_gradient(value))
            return
        # As with a variable that is assigned and read again: no gradient flows through the assignment.
        super().add_update((variable, tf.stop_gradient(value)))
        self._assigned[id(variable)] = variable

    def _assign_parameter(self, variable: keras.Variable, value: tf.Tensor) -> None:
        weight = self.state_mapping[id(variable)]
        self.state_mapping[id(variable)] = WeightTensor(weight.handle, variable.path, value)
        self._pending[id(variable)] = variable
        self.assigns_parameters = True

    @property
    def assigns(self) -> bool:
        """Whether a variable was assigned."""
        return bool(self._assigned)

    def current(self, variables: list[keras.Variable]) -> list[tf.Tensor]:
        """Returns the current values of variables."""
        current = [super(Assignments, self).get_current_value(variable) for variable in variables]
        return [value.current if isinstance(value, WeightTensor) else value for value in current]

    def check(self, model: keras.Model, state: Sequence[keras.Variable]) -> None:
        """Rejects assignments that would be lost.

        Args:
            model: the model.
            state: its state variables.

        Raises:
            TrainingError: the step assigned a variable that is neither a state variable nor a metric variable of the
                model.
        """
        kept = [*state, *model.metrics_variables]
        # If a model overrides `metrics`, Keras still updates these, and reports none of them.
        for unreported in compiled_metrics(model):
            kept += unreported.variables
        lost = self._assigned.keys() - {id(variable) for variable in kept}
        for variable in (self._assigned[key] for key in lost):
            if any(variable is other for other in model.trainable_variables):
                raise TrainingError(
                    f"a step assigns {variable.path!r}, which is trainable",
                    code="assigns-trainable-variable",
                    hint="assign trainable variables in train steps only, and others anywhere: those that "
                    "add_weight(trainable=False) has created",
                )
            raise TrainingError(
                f"a step assigns {variable.path!r}, which is not a variable of the model or of its metrics",
                code="assigns-untracked-variable",
                hint="create the variable with add_weight(trainable=False) of a layer or the model, and keep seed "
                "generators and metrics as attributes",
            )


@contextlib.contextmanager
def seeded_draws_only() -> Iterator[None]:
    """Rejects random values drawn without a seed within the context.

    They would use Keras's process-wide seed generator. It is not part of the model's state, so every step would draw
    the same values.
    """
    with global_seed_generator(_Refused()):
        yield


class _Refused:
    """Replaces Keras's process-wide seed generator."""

    def next(self, **_: Any) -> None:
        # A ValueError: Keras adds the layer's name to it, and the task prints the user's line.
        raise ValueError(
            "random values are drawn without a seed: create a keras.random.SeedGenerator in the layer and pass it, as "
            "in keras.random.normal(shape, seed=self.seeds)"
        )
