"""The stateless scope in which a step calls the model: variables have given values, and assignments are collected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.keras_model import compiled_metrics, global_seed_generator
from tfdist_cli.train.tf_compat.variables import WeightTensor, stored


class Assignments(keras.StatelessScope):
    """Collects what a step assigns to variables.

    Args:
        values: the variables, each with the value that it has at the start of the step.
    """

    def __init__(self, values: list[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__(state_mapping=values, collect_losses=True)
        self._assigned: dict[int, keras.Variable] = {}
        for variable, _ in values:
            value = self.state_mapping[id(variable)]
            if getattr(stored(variable), "trainable", True) and value.dtype.is_floating:
                self.state_mapping[id(variable)] = WeightTensor(value, variable.path)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """See `keras.StatelessScope`."""
        variable, value = update
        # As with a variable that is assigned and read again: no gradient flows through the assignment.
        super().add_update((variable, tf.stop_gradient(value)))
        self._assigned[id(variable)] = variable

    @property
    def assigns(self) -> bool:
        """Whether a variable was assigned."""
        return bool(self._assigned)

    def current(self, variables: list[keras.Variable]) -> list[tf.Tensor]:
        """Returns the current values of variables."""
        current = [self.get_current_value(variable) for variable in variables]
        return [value.handle if isinstance(value, WeightTensor) else value for value in current]

    def check(self, model: keras.Model) -> None:
        """Rejects assignments that would be lost.

        Raises:
            TrainingError: the step assigned a variable that is neither a state variable nor a metric variable of the
                model.
        """
        kept = [*model.non_trainable_variables, *model.metrics_variables]
        # If a model overrides `metrics`, Keras still updates these, and reports none of them.
        for unreported in compiled_metrics(model):
            kept += unreported.variables
        lost = self._assigned.keys() - {id(variable) for variable in kept}
        for variable in (self._assigned[key] for key in lost):
            if any(variable is other for other in model.trainable_variables):
                raise TrainingError(
                    f"a step assigns {variable.path!r}, which is trainable",
                    code="assigns-trainable-variable",
                    hint="assign only variables that add_weight(trainable=False) has created; SpectralNormalization "
                    "cannot be trained",
                )
            raise TrainingError(
                f"a step assigns {variable.path!r}, which is not a variable of the model or of its metrics",
                code="assigns-untracked-variable",
                hint="create the variable with add_weight(trainable=False) of a layer or the model, and keep seed "
                "generators and metrics as attributes; stateful RNNs cannot be trained",
            )


@contextlib.contextmanager
def seeded_draws_only() -> Iterator[None]:
    """Rejects random values drawn without a seed within the context.

    They would use Keras's process-wide seed generator. It is not part of the model's state, so every step would draw
    the same values.
    """
    with global_seed_generator(_ProcessWideSeeds()):
        yield


class _ProcessWideSeeds:
    """Replaces Keras's process-wide seed generator."""

    def next(self, **_: Any) -> None:
        # A ValueError: Keras adds the layer's name to it, and the task prints the user's line.
        raise ValueError(
            "random values are drawn without a seed: create a keras.random.SeedGenerator in the layer and pass it, as "
            "in keras.random.normal(shape, seed=self.seeds)"
        )
