"""Rejects models that steps of several workers could not train as Keras does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.assignments import Assignments
from tfdist_cli.train.model.own_step.optimizers import optimizers_of
from tfdist_cli.train.model.trace.additivity import adds_up
from tfdist_cli.train.model.trace.step_trace import placeholder_for
from tfdist_cli.train.optimizers.apply import innermost
from tfdist_cli.train.tf_compat import keras_model
from tfdist_cli.train.tf_compat.distribute import strategy_of
from tfdist_cli.train.tf_compat.functions import functions_inlined
from tfdist_cli.train.variables.sharding import parts

if TYPE_CHECKING:
    from tfdist_cli.train.model.train_step import ModelStep, Tensors


def check_compiled(model: Any) -> None:
    """Checks that the model is a compiled Keras model.

    Raises:
        TrainingError: it is not.
    """
    if not keras_model.is_model(model):
        raise TrainingError(
            f"expected a keras.Model, got {type(model).__name__}",
            code="not-a-keras-model",
            hint="return a keras.Model that compile() was called on",
        )
    if not model.compiled or model.optimizer is None:
        raise TrainingError(
            f"the model {model.name!r} is not compiled",
            code="model-not-compiled",
            hint="call model.compile(optimizer, loss, metrics)",
        )


def check_is_traced(model: keras.Model) -> None:
    """Checks that the model's steps may be traced: attributes that callbacks change would keep the values of the trace.

    Raises:
        TrainingError: the model was compiled to run eagerly.
    """
    if model.run_eagerly:
        raise TrainingError(
            f"the model {model.name!r} is compiled with run_eagerly=True, and tfdist traces each step once",
            code="runs-eagerly",
            hint="compile it without run_eagerly, and keep values that callbacks change in variables: "
            "add_weight(trainable=False)",
        )


def check_scope(model: keras.Model) -> None:
    """Checks that the model and its optimizers were created under the strategy's scope.

    Raises:
        TrainingError: one was not.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    creators = {f"the model {model.name!r}": strategy_of(model)}
    for optimizer in map(innermost, optimizers_of(model)):
        creators[f"its optimizer {optimizer.name!r}"] = strategy_of(optimizer)
    creators |= {variable.path: strategy_of(variable.value) for variable in model.variables}
    for name, creator in creators.items():
        if creator is not strategy:
            raise TrainingError(
                f"{name} was created outside of the scope of the cluster",
                code="created-outside-scope",
                hint="create and compile the model, its layers and its optimizer under `with tfdist.scope():`; what is "
                "called later, such as compile(), build(), quantize() or enable_lora(), has to be there, too",
            )


def check_logs(model: keras.Model, logs: dict[str, Any]) -> None:
    """Rejects an overridden `compute_metrics` whose result is not that of the metrics.

    Raises:
        TrainingError: the method returns other names than `get_metrics_result`, so its values are those of one batch.
    """
    if type(model).compute_metrics is keras.Model.compute_metrics:
        return
    differing = sorted(logs.keys() ^ model.get_metrics_result().keys())
    if differing:
        raise TrainingError(
            f"compute_metrics() and get_metrics_result() of {type(model).__name__} differ in {', '.join(differing)}",
            code="metrics-results-differ",
            hint="update the metrics in compute_metrics(), and compute results from their variables in "
            "get_metrics_result()",
        )


def check_sums(variables: list[keras.Variable], before: Tensors, after: Tensors) -> None:
    """Checks that a step only adds to the variables of metrics.

    Args:
        variables: the variables.
        before: their values before the step.
        after: those after it, in the same graph.

    Raises:
        TrainingError: it does something else with one.
    """
    for variable, adds in zip(variables, adds_up(before, after), strict=True):
        if not adds:
            raise TrainingError(
                f"the metric variable {variable.path!r} is not a sum over batches, so the values of several workers "
                "cannot be added",
                code="metric-not-a-sum",
                hint="only add to the variable, with variable.assign_add(...), and compute the rest in the metric's "
                "result()",
            )


def check_overwritten(step: ModelStep) -> None:
    """Rejects weights that are overwritten with their gradients, as the scales of float8 layers, by several workers.

    Args:
        step: the model's step, built.

    Raises:
        TrainingError: gradients of several batches, which are added, make an update of such a weight.
    """
    for variable in step.parameters if step.batches_per_update > 1 else ():
        if getattr(variable, "overwrite_with_gradient", False):
            raise TrainingError(
                f"{variable.path!r} is overwritten with its gradient, and those of several workers would be added",
                code="overwritten-with-gradient",
                hint="train layers of quantize('float8') in one process, or with asynchronous workers",
            )


def check_trained(step: ModelStep, element_spec: Any, untrained: Sequence[int]) -> None:
    """Rejects models in which weights that Keras trains get no gradient in this step.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        untrained: the indices in `parameters` of the weights without a gradient.

    Raises:
        TrainingError: there is such a weight, or no weight has a gradient.
    """
    lost = [index for index in untrained if index in _trained_by_keras(step, element_spec, untrained)]
    if lost:
        raise TrainingError(
            f"{step.parameters[lost[0]].path!r} is part of the loss, but the step has no gradient for it",
            code="gradient-lost",
            hint="use the layer's weight itself in call(), not the tf.Variable that stores it (its value in build())",
        )
    if untrained and len(untrained) == len(step.parameters):
        raise TrainingError(
            f"no weight of {step.model.name!r} has a gradient: the loss does not depend on the weights",
            code="no-gradients",
            hint="compute the loss from the output of the model, without stop_gradient or rounding in between",
        )


def _trained_by_keras(step: ModelStep, element_spec: Any, indices: Sequence[int]) -> set[int]:
    """Returns the parameters that get a gradient if the model reads the variables themselves, as in Keras's `fit`.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        indices: the parameters to look at, as indices in `step.parameters`.
    """
    found: set[int] = set()
    stored = {index: parts(step.parameters[index]) for index in indices}

    def trace(*flat: tf.Tensor) -> list[Any]:
        batch = tf.nest.pack_sequence_as(element_spec, flat, expand_composites=True)
        kept = [*step.state, *step.metrics]
        replica = tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
        with replica, Assignments([(variable, placeholder_for(variable)) for variable in kept]):
            with step.unseeded.allowed(), functions_inlined(), tf.GradientTape() as tape:
                loss, _ = step.compute_losses(batch, training=True)
            gradients = tape.gradient(loss, stored)
        found.update(index for index, each in gradients.items() if any(gradient is not None for gradient in each))
        return [loss]

    if indices:
        tf.compat.v1.wrap_function(trace, tf.nest.flatten(element_spec, expand_composites=True))
    return found
