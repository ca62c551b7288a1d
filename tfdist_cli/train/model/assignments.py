"""The scope in which a step calls the model: variables have given values, and what is assigned is kept, not written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.variables.weight_tensors import Weight

_GLOBAL_SEED_GENERATOR = "global_seed_generator"
"""The name by which Keras keeps the process-wide seed; not every version has a constant for it."""


class Assignments(keras.StatelessScope):
    """Keeps what a step assigns to variables, and knows which these are.

    Args:
        given: variables and the values that they have for the step.
    """

    def __init__(self, given: list[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__(state_mapping=given, collect_losses=True)
        self._assigned: dict[int, keras.Variable] = {}
        for variable, _ in given:
            value = self.state_mapping[id(variable)]
            if getattr(variable._value, "trainable", True) and value.dtype.is_floating:
                self.state_mapping[id(variable)] = Weight(value, variable.path)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """See `keras.StatelessScope`."""
        variable, value = update
        # As a variable that is assigned and read again: gradients end there.
        super().add_update((variable, tf.stop_gradient(value)))
        self._assigned[id(variable)] = variable

    def current(self, variables: list[keras.Variable]) -> list[tf.Tensor]:
        """What the variables have come to."""
        current = [self.get_current_value(variable) for variable in variables]
        return [value.handle if isinstance(value, Weight) else value for value in current]

    def check(self, model: keras.Model) -> None:
        """Refuses an assignment that would be lost.

        Raises:
            TrainingError: a variable was assigned that is not one of those that a step may change.
        """
        kept = [*model.non_trainable_variables, *model.metrics_variables]
        # Where a model has a `metrics` of its own, Keras counts in these even so, and reports nothing of them.
        for unreported in filter(None, (model._loss_tracker, model._compile_metrics)):
            kept += unreported.variables
        for unreported in model._compile_loss.metrics if model._compile_loss else ():
            kept += unreported.variables
        lost = self._assigned.keys() - {id(variable) for variable in kept}
        for variable in (self._assigned[key] for key in lost):
            learned = any(variable is other for other in model.trainable_variables)
            raise TrainingError(
                f"a step assigns {variable.path!r}, which "
                + ("is learned" if learned else "is none of the model's variables and none of its metrics'"),
                hint="assign what a layer or the model has made by add_weight(trainable=False), and keep seeds and "
                "metrics as their attributes; SpectralNormalization and stateful RNNs cannot be trained",
            )


@contextlib.contextmanager
def seeded_draws_only() -> Iterator[None]:
    """Refuses Keras's own process-wide seeds: counted in no model's state, they would be the same in each step."""
    before = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, _ProcessWideSeeds())
    try:
        yield
    finally:
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, before)


class _ProcessWideSeeds:
    """Stands where Keras looks for the seed of a random operation that was given none."""

    def next(self, **_: Any) -> None:
        # A ValueError, so that Keras names the layer and the task shows the user's line.
        raise ValueError(
            "random numbers are drawn without a seed: give the layer a keras.random.SeedGenerator and pass it on: "
            "keras.random.normal(shape, seed=self.seeds)"
        )
