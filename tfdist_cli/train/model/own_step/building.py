"""Creates the variables of a model with a `train_step` of its own, and finds the updates that the step makes."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.assignments import Assignments, OptimizerUpdate
from tfdist_cli.train.model.own_step.optimizers import optimizers_of, updates_handed_over
from tfdist_cli.train.model.rng.unseeded import UnseededDraws
from tfdist_cli.train.model.trace.step_trace import placeholder_for
from tfdist_cli.train.tf_compat import keras_model
from tfdist_cli.train.tf_compat.functions import functions_inlined

log = logging.getLogger("tfdist")


def build_layers(model: keras.Model, element_spec: Any) -> None:
    """Creates the variables of layers by the model's own step, which need not call the model with the batch's x."""
    try:
        keras_model.traced_symbolically(model.train_step, element_spec)
    except Exception:
        # Expected, after the forward pass: variables that are only being created have no gradients. All other
        # errors are raised again, with the layers built, or without.
        log.debug("train_step() of %s while layers are built", type(model).__name__, exc_info=True)
    if not keras_model.layers_are_built(model):
        keras_model.build(model, element_spec)


def traced_updates(model: keras.Model, unseeded: UnseededDraws, element_spec: Any) -> list[OptimizerUpdate]:
    """Traces the model's own step, which creates the variables of its metrics; returns its updates.

    Args:
        model: the model, its layers built.
        unseeded: the random values that steps draw without a seed.
        element_spec: the `tf.TypeSpec`s of a batch.

    Raises:
        TrainingError: there is no update.
    """
    known = [*model.variables, *model.metrics_variables]
    updates: list[OptimizerUpdate] = []

    def run(batch: Any) -> None:
        values = [(variable, placeholder_for(variable)) for variable in known]
        scope = Assignments(values, parameters=model.trainable_variables)
        watched, handed_over = unseeded.watched(), updates_handed_over(optimizers_of(model))
        with watched, unseeded.allowed(), handed_over, scope, functions_inlined():
            model.train_step(batch)
        updates.extend(scope.updates)

    keras_model.traced_symbolically(run, element_spec)
    if not updates:
        raise TrainingError(
            f"train_step() of {type(model).__name__} updates nothing by an optimizer of the model",
            code="no-updates",
            hint="call self.optimizer.apply(gradients, variables), with an optimizer that is an attribute of the model",
        )
    return updates
