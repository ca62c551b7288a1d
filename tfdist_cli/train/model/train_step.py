"""The train step and the test step of a compiled Keras model, as pure functions.

The functions take the values of the model's variables as tensors. They return the loss, the gradients and the new
values. They read no variable and assign none, so all engines share them: an engine decides where the variables are
stored, how gradients are reduced, and which task applies them. The model is called in a `keras.StatelessScope`, as
Keras's TensorFlow trainer calls it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.data import mismatch
from tfdist_cli.train.layers.dynamic_tables import attach_slots, index_variables
from tfdist_cli.train.model import losses
from tfdist_cli.train.model.assignments import (
    Assigned,
    Assignments,
    Optimizer,
    Update,
    awaited_reads,
)
from tfdist_cli.train.model.compute_device import DeviceScope
from tfdist_cli.train.model.many_classes import fewer_passes
from tfdist_cli.train.model.model_checks import check_compiled, check_logs, check_scope, check_sums, check_trained
from tfdist_cli.train.model.own_step.building import build_layers, traced_updates
from tfdist_cli.train.model.own_step.logs import step_logs
from tfdist_cli.train.model.own_step.optimizers import (
    build_optimizers,
    overrides,
    scaled,
    updates_handed_over,
)
from tfdist_cli.train.model.rng.unseeded import UnseededDraws
from tfdist_cli.train.model.trace.step_trace import StepTrace
from tfdist_cli.train.optimizers.apply import fixed_loss_scales, learning_rates, loss_scales, terms_taken
from tfdist_cli.train.optimizers.terms import Terms
from tfdist_cli.train.tf_compat import keras_model
from tfdist_cli.train.tf_compat.functions import functions_inlined
from tfdist_cli.train.tf_compat.op_errors import is_from_users_code

log = logging.getLogger("tfdist")

Tensors = list[tf.Tensor]
ParameterScope = Callable[[Tensors], AbstractContextManager[Tensors]]
"""Maps the parameters passed to a step to the values that its model is called with, for the duration of a context.

The default, `contextlib.nullcontext`, leaves them unchanged. See `EmbeddingTables.parameter_scope` for another one.
"""


@dataclass(frozen=True)
class StepResult:
    """The result of a step on one batch.

    Args:
        loss: the loss of the batch, without loss scaling, shape (). The mean over all batches of an update is the loss
            of the update.
        gradients: one per parameter: a tensor, a `tf.IndexedSlices`, or None if the loss does not depend on the
            parameter.
        state: the new value of each non-trainable variable.
        metrics: the new value of each metric variable.
        examples: the number of examples in the batch, int64, shape ().
        logs: what a `train_step` of the model's own has returned that does not follow from metrics; see
            `ModelStep.logs_of_batch`.
    """

    loss: tf.Tensor
    gradients: list[Any]
    state: Tensors
    metrics: Tensors
    examples: tf.Tensor
    logs: Tensors


@dataclass(frozen=True)
class PlannedUpdate:
    """A call of the function `update` in a step that makes its updates itself, see `assignments.Update`.

    Args:
        optimizer: the optimizer. None if the rest of the step, after the last update, assigns parameters or reads
            updated ones.
        variables: the variables that it updates.
        assigned: the parameters that are assigned before.
    """

    optimizer: Optimizer | None
    variables: list[keras.Variable]
    assigned: list[keras.Variable]


class ModelStep:
    """The pure train and test step of one model.

    Args:
        model: a compiled Keras model.

    Raises:
        TrainingError: the model is not compiled.

    Attributes:
        own_step: whether the model has a `train_step` of its own.
        updates_within: whether this step makes its updates itself, by the function `update` that it is given: there are
            several, it reads a variable after its update, or it assigns a parameter. Otherwise the engine updates
            `parameters` after the step, with `optimizer`. Known after `plan_updates`.
        updates: the calls of `update` in a step with `updates_within`.
        optimizer: the optimizer of the first update.
        optimizers: all optimizers whose variables are part of the training.
        unseeded: the random values that steps draw without a seed.
        logs_of_batch: the names of logs that do not follow from metrics.
        log_names: the names of all logs of a train step (True) and a test step (False), if the model has its own.
    """

    def __init__(self, model: keras.Model) -> None:
        check_compiled(model)
        self.model = model
        self.own_step = overrides(model, "train_step")
        self.updates_within = False
        self.updates: tuple[PlannedUpdate, ...] = ()
        self.unseeded = UnseededDraws()
        self.optimizer: Optimizer = model.optimizer
        self.optimizers: list[Optimizer] = [model.optimizer]
        self.logs_of_batch: tuple[str, ...] = ()
        self.log_names: dict[bool, list[str]] = {}
        self._updated: list[keras.Variable] | None = None
        """What the optimizers of the model's own step update."""
        self.jit = False
        """Whether XLA compiles train steps. Not supported together with a `parameter_scope`."""
        self.device_scope: DeviceScope = contextlib.nullcontext
        """The device scope in which the model is computed."""
        self.batches_per_update: int | tf.Tensor = 1
        """The number of batches whose gradients are combined into one update. A train step computes one of them."""
        self.examples_per_batch: int | tf.Tensor | None = None
        """The number of examples with which a batch counts once in the mean over the batches of an update; a larger one
        counts for more. None if all batches count the same."""
        self.counts: tf.Tensor | None = None
        """Whether a batch counts at all, bool, shape (); otherwise its gradients are 0. None: it does."""
        self.sums_gradients = False
        """Whether the engine sums the gradients of these batches. If so, the step divides its gradient by their number;
        otherwise the engine computes the mean itself."""
        self._traces: dict[tuple[str, bool], StepTrace] = {}
        self.compile()

    def compile(self) -> None:
        """Has XLA, if it is used, compile the step anew."""
        self._compiled = tf.function(self._train_at_scales, jit_compile=True, autograph=False)

    def for_updates_of(self, batches: tf.Tensor) -> ModelStep:
        """Returns this step with a number of batches per update that is known only when it runs."""
        step = copy(self)
        step.batches_per_update = batches
        step.compile()
        return step

    def weighted_by(self, examples_per_batch: tf.Tensor, counts: tf.Tensor | None) -> ModelStep:
        """Returns this step for a batch that counts by its examples; see the attributes for the arguments."""
        step = copy(self)
        step.examples_per_batch, step.counts = examples_per_batch, counts
        return step

    def build(self, element_spec: Any) -> None:
        """Creates all variables of the model, its metrics and its optimizer.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.

        Raises:
            TrainingError: the model does not accept such a batch, or was created outside of the strategy's scope.
        """
        check_scope(self.model)
        mismatch.check_types(self.model, element_spec)
        _build_specs[self.model] = element_spec
        # Keras has no public method that builds model, metrics and optimizer from a type specification.
        try:
            if not self.own_step:
                keras_model.build(self.model, element_spec)
            elif not keras_model.layers_are_built(self.model):
                build_layers(self.model, element_spec)
            if self.own_step:
                self._build_own_step(element_spec)
        except (ValueError, RuntimeError, TypeError) as error:
            if is_from_users_code(error):
                raise
            raise mismatch.explained(self.model, element_spec, error) from error
        losses.wrap_sum_losses(self.model)
        attach_slots(self.model)
        if self.own_step:
            self._traced(element_spec)

    def begin_again(self, element_spec: Any) -> None:
        """Prepares another training with the variables and the traces of the one before.

        Args:
            element_spec: the same as before.
        """
        _build_specs[self.model] = element_spec  # an evaluation may have built it for other batches
        self.unseeded.begin()

    def plan_updates(self, element_spec: Any) -> None:
        """Finds out whether the step makes its updates itself; a model without a step of its own may as well.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        self._traced(element_spec)

    def _build_own_step(self, element_spec: Any) -> None:
        """Builds metrics, and the optimizers for what they update in the model's own step."""
        updates = traced_updates(self.model, self.unseeded, element_spec)
        build_optimizers(updates)
        updated = {id(variable): variable for update in updates for variable in update.variables}
        first = [variable for variable in self.model.trainable_variables if id(variable) in updated]
        self._updated = list({**{id(variable): variable for variable in first}, **updated}.values())
        applied = [update.optimizer for update in updates]
        self.optimizer = applied[0]
        each = {id(optimizer): optimizer for optimizer in [self.model.optimizer, *applied]}
        self.optimizers = list(each.values())
        self.updates_within = len(updates) > 1

    @property
    def assigns_parameters(self) -> bool:
        """Whether a train step assigns parameters; known after `plan_updates`."""
        return any(update.assigned for update in self.updates)

    @property
    def parameters(self) -> list[keras.Variable]:
        """The variables that optimizers update: the trainable ones, or those that the model's own step updates."""
        return list(self.model.trainable_variables if self._updated is None else self._updated)

    @property
    def state(self) -> list[keras.Variable]:
        """All other variables: moving statistics, seeds of random generators, and frozen weights."""
        more = [*self.recurrent_state, *([self.unseeded.generator.state] if self.unseeded.generator else [])]
        if self._updated is None:
            return [*self.model.non_trainable_variables, *more]
        updated = {id(variable) for variable in self._updated}
        variables = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        return [*(variable for variable in variables if id(variable) not in updated), *more]

    @property
    def saved_state(self) -> list[keras.Variable]:
        """What checkpoints hold of the model beside parameters: the state, and the indices of dynamic tables."""
        return [*self.state, *index_variables(self.model)]

    @property
    def recurrent_state(self) -> list[keras.Variable]:
        """The part of the state that stateful recurrent layers keep from batch to batch: each replica has its own."""
        found = [each for layer in keras_model.layers_of(self.model) for each in keras_model.recurrent_states(layer)]
        return list({id(variable): variable for variable in found}.values())

    @property
    def optimizer_variables(self) -> list[keras.Variable]:
        """The variables of all optimizers."""
        return [variable for optimizer in self.optimizers for variable in optimizer.variables]

    @property
    def metrics(self) -> list[keras.Variable]:
        """The variables of all metrics, including the mean of the loss."""
        return list(self.model.metrics_variables)

    def train(
        self,
        parameters: Tensors,
        state: Tensors,
        metrics: Tensors,
        batch: Any,
        parameter_scope: ParameterScope = contextlib.nullcontext,
        update: Update | None = None,
    ) -> StepResult:
        """Runs the forward and backward pass on one batch.

        Args:
            parameters: the values of `self.parameters`; gradients are computed with respect to these tensors.
            state: the values of `self.state`.
            metrics: the values of `self.metrics`.
            batch: the batch: x, (x, y) or (x, y, sample_weight).
            parameter_scope: maps `parameters` to the values that the model is called with.
            update: makes the updates of a step with `updates_within`, from the gradients of this batch's share in the
                loss of an update; called within `device_scope`.
        """
        if self.own_step and not self.jit:
            with self.device_scope(), fewer_passes():
                return StepResult(*self._train_by_own_step(parameters, state, metrics, batch, update))
        if self.jit:
            return self.train_with_xla(parameters, state, metrics, batch)
        with self.device_scope(), fewer_passes():
            return StepResult(*self._train(parameters, state, metrics, batch, parameter_scope, update))

    def train_with_xla(self, parameters: Tensors, state: Tensors, metrics: Tensors, batch: Any) -> StepResult:
        """Runs the same pass, compiled by XLA."""
        with self.device_scope():
            with tf.control_dependencies(awaited_reads()):
                scales = loss_scales(self.optimizers)
            return StepResult(*self._compiled(parameters, state, metrics, batch, scales))

    def _train_at_scales(
        self, parameters: Tensors, state: Tensors, metrics: Tensors, batch: Any, scales: list[tf.Tensor | None]
    ) -> tuple[Any, ...]:
        with fixed_loss_scales(self.optimizers, scales):
            return self._train(parameters, state, metrics, batch, contextlib.nullcontext)

    def _train(
        self,
        parameters: Tensors,
        state: Tensors,
        metrics: Tensors,
        batch: Any,
        parameter_scope: ParameterScope,
        update: Update | None = None,
    ) -> tuple[Any, ...]:
        if self.own_step:
            return self._train_by_own_step(parameters, state, metrics, batch)
        within = update if self.updates_within else None
        with parameter_scope(parameters) as weights, self._with_values(weights, state, metrics, within) as scope:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(parameters)
                minimized, reported = self.compute_losses(batch, training=True)
                divides = self.sums_gradients and self.batches_per_update > 1
                weighted = self._weighted(minimized, batch)
                loss = self.model.optimizer.scale_loss(weighted / self.batches_per_update if divides else weighted)
            # Within the scope: a gradient function that recomputes a part of the model calls its layers again.
            gradients = tape.gradient(loss, parameters)
            if scope.assigns_parameters:
                scope.apply_gradients(self.model.optimizer, gradients, self.parameters)
            self._plan(scope)
        return _fields(self._result(batch, reported, scope, gradients))

    def _train_by_own_step(
        self, parameters: Tensors, state: Tensors, metrics: Tensors, batch: Any, update: Update | None = None
    ) -> tuple[Any, ...]:
        """Calls the model's own `train_step`. Without `update`, its updates are only collected."""
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]

        def shared(
            make: Update,
            optimizer: Optimizer | None,
            gradients: list[Any],
            variables: list[keras.Variable],
            assigned: Assigned,
        ) -> Tensors:
            return make(optimizer, [self._share(each, x) for each in gradients], variables, assigned)

        within = partial(shared, update) if update and self.updates_within else None
        with (
            self._with_values(parameters, state, metrics, within) as scope,
            updates_handed_over(self.optimizers),
            losses.batches_per_update(self._relative_update_size(x)),
        ):
            logs = step_logs(self.model, self.model.train_step(batch), scope, training=True)
            self._plan(scope)
        self.log_names[True], self.logs_of_batch = logs.names, tuple(logs.of_batch)
        given = {
            id(variable): gradient
            for each in scope.updates
            for variable, gradient in zip(each.variables, each.gradients, strict=True)
        }
        gradients = [self._share(given.get(id(variable)), x) for variable in self.parameters]
        return _fields(self._result(batch, logs.loss, scope, gradients, list(logs.of_batch.values())))

    def _plan(self, scope: Assignments) -> None:
        """Ends the updates of a step that has been traced, and notes which ones it makes itself."""
        scope.assign_parameters()
        several = len(scope.updates) > 1
        self.updates_within = self.updates_within or several or scope.reads_updated or scope.assigns_parameters
        if self.updates_within and not self.updates:
            planned = [PlannedUpdate(each.optimizer, each.given, each.assigned) for each in scope.updates]
            if scope.reads_last or scope.assigned:
                planned.append(PlannedUpdate(None, [], scope.assigned))
            self.updates = tuple(planned)

    def _share(self, gradient: Any, x: Any) -> Any:
        """Returns a gradient of the model's own step as a part of the update that it is combined into."""
        if self.examples_per_batch is not None:
            gradient = scaled(gradient, self._weight_of(x))
        divides = self.sums_gradients and self.batches_per_update > 1
        return scaled(gradient, 1 / self.batches_per_update) if divides else gradient

    def evaluate(
        self,
        parameters: Tensors,
        state: Tensors,
        metrics: Tensors,
        batch: Any,
        parameter_scope: ParameterScope = contextlib.nullcontext,
    ) -> StepResult:
        """Computes loss and metrics of one batch, as `test_step` does. `gradients` of the result is empty."""
        with (
            self.device_scope(),
            fewer_passes(),
            parameter_scope(parameters) as weights,
            self._with_values(weights, state, metrics, training=False) as scope,
        ):
            if overrides(self.model, "test_step"):
                with losses.batches_per_update(1):
                    logs = step_logs(self.model, self.model.test_step(batch), scope, training=False)
                self.log_names[False], loss = logs.names, logs.loss
            else:
                _, loss = self.compute_losses(batch, training=False)
        return self._result(batch, loss, scope, [])

    def operation_count(self, element_spec: Any) -> int:
        """Returns the number of operations in the graph of a train step, without the update.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        return self._traced(element_spec).operation_count

    def lookups(self, element_spec: Any) -> dict[int, int | None]:
        """Returns the indices in `parameters` of those whose gradients have only the rows that the batch looks up.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.

        Returns:
            The indices, each with the number of lookups; None if it differs from batch to batch.
        """
        return self._traced(element_spec).lookups

    def factored(self, element_spec: Any) -> dict[int, int]:
        """Returns the indices in `parameters` of those whose gradients have factors, see `trace.factors`.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.

        Returns:
            The indices, each with the number of rows of the factors; none if XLA compiles the step, whose gradients
            are the results of one operation.
        """
        return {} if self.jit else self._traced(element_spec).factored

    def trains_all(self, element_spec: Any) -> bool:
        """Whether the loss depends on all parameters.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        return not self._traced(element_spec).untrained

    def reads_optimizers(self, element_spec: Any) -> bool:
        """Whether a train step reads `iterations` or a slot of an optimizer.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        trace = self._traced(element_spec)
        rates = {id(rate) for optimizer in self.optimizers for rate in learning_rates(optimizer)}
        variables = [each for optimizer in self.optimizers for each in optimizer.variables if id(each) not in rates]
        return trace.reads(variables)

    def looked_up_by_examples(self, element_spec: Any) -> set[int]:
        """Returns those of `lookups` whose rows are values of the batch, and not the same in each batch.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        return self._traced(element_spec).repeating

    def terms(
        self,
        element_spec: Any,
        optimizer: Optimizer | None = None,
        variables: Sequence[keras.Variable] | None = None,
    ) -> dict[int, Terms]:
        """Returns what an update takes of each term of the gradients that have some, see `terms_taken`.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            optimizer: the optimizer of the update; None for the step's.
            variables: those that it updates; None for the parameters.

        Returns:
            For the indices in `variables` of those of which an update may look up a row several times.
        """
        variables = self.parameters if variables is None else variables
        taken = terms_taken(optimizer or self.optimizer, variables)
        if not taken:
            return {}
        repeating = {id(self.parameters[index]) for index in self.looked_up_by_examples(element_spec)}
        return {index: kind for index, kind in taken.items() if id(variables[index]) in repeating}

    def graph(self, element_spec: Any) -> tf.Graph:
        """Returns the graph of a train step, without the update.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        return self._traced(element_spec).graph

    def assigned_state(self, element_spec: Any) -> tuple[int, ...]:
        """Returns the indices in `state` of the variables that a train step assigns; only user code assigns the others.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        return self._traced(element_spec).assigned

    def retained_state(self, element_spec: Any) -> dict[int, float]:
        """Returns the indices of `assigned_state`, and the part of its old value that a train step leaves in each.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        trace = self._traced(element_spec)
        return dict(zip(trace.assigned, trace.retained, strict=True))

    def state_assigned_in_evaluation(self, element_spec: Any) -> dict[int, bool]:
        """Returns the indices in `state` of the variables that a test step assigns, and whether it only adds to them.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
        """
        trace = self._traced(element_spec, training=False) if self.state else None
        return dict(zip(trace.assigned, trace.adds, strict=True)) if trace else {}

    def increments(self, element_spec: Any, indices: Sequence[int], *, training: bool = True) -> list[np.ndarray]:
        """Returns how much one step adds to each of some counters, independently of its batch.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            indices: the counters, as indices in `state`.
            training: whether to look at the train step or the test step.

        Raises:
            TrainingError: the increment depends on the batch or on another value computed in the step.
        """
        if not indices:
            return []
        if self.own_step and not training and not self._scores(element_spec):
            return [np.zeros(self.state[index].shape, np.int64) for index in indices]
        return self._traced(element_spec, training=training).increments(self.state, indices)

    def _scores(self, element_spec: Any) -> bool:
        """Whether such batches can be scored; a model with its own step may be scored by other batches, or by none."""
        try:
            self._traced(element_spec, training=False)
        except Exception as error:  # noqa: BLE001 it is raised when such batches are scored
            log.debug("batches of the training cannot be scored: %s", error)
            return False
        return True

    def _traced(self, element_spec: Any, *, training: bool = True) -> StepTrace:
        key = repr(element_spec), training
        trace = self._traces.get(key)
        if trace is None:
            with self.unseeded.watched():
                trace = StepTrace(self, element_spec, training=training)
            if self.unseeded.create():  # the state has one variable more
                self._traces.clear()
                trace = StepTrace(self, element_spec, training=training)
            self._traces[key] = trace
            if training and not self.own_step:
                check_trained(self, element_spec, trace.untrained)
        return trace

    @contextlib.contextmanager
    def _with_values(
        self,
        parameters: Tensors,
        state: Tensors,
        metrics: Tensors,
        update: Update | None = None,
        *,
        training: bool = True,
    ) -> Iterator[Assignments]:
        """Gives the model's variables these values within the context. The scope collects what is assigned to them."""
        metrics = [tf.identity(value) for value in metrics]  # distinct tensors, which can be followed in the graph
        variables = [*self.parameters, *self.state, *self.metrics]
        pairs = list(zip(variables, [*parameters, *state, *metrics], strict=True))
        with (
            Assignments(pairs, update, self.parameters if training else ()) as scope,
            self.unseeded.allowed(),
            functions_inlined(),
        ):
            scope.metrics_before = metrics
            yield scope
        scope.check(self.model, self.state)
        if not tf.executing_eagerly():
            check_sums(self.metrics, metrics, scope.current(self.metrics))

    def compute_losses(self, batch: Any, *, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Calls the model and its metrics; returns the loss to minimize and the loss to report."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        model = self.model
        with losses.batches_per_update(self._relative_update_size(x) if training else 1):
            # Not `stateless_call`: it calls `call` directly and skips what `__call__` does, which passes `training` to
            # the inner layers, casts the inputs, and adds the model's own activity regularizer.
            y_pred = model(x, **({"training": training} if keras_model.accepts_training(model) else {}))
            loss = keras_model.compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training)
            keras_model.loss_tracker(model).update_state(loss, sample_weight=tf.cast(_batch_size(x), tf.float32))
            logs = model.compute_metrics(x, y, y_pred, weight)
            check_logs(model, logs)
            minimized = losses.minimized(loss)
        return minimized, tf.cast(tf.reduce_mean(loss) if loss.shape.rank else loss, tf.float32)

    def _relative_update_size(self, x: Any) -> int | tf.Tensor:
        """Returns how many times as many examples as a batch the update has."""
        if self.examples_per_batch is None:
            return self.batches_per_update
        examples = tf.cast(self.batches_per_update, tf.float64) * tf.cast(self.examples_per_batch, tf.float64)
        return examples / tf.cast(_batch_size(x), tf.float64)

    def _weighted(self, loss: tf.Tensor, batch: Any) -> tf.Tensor:
        """Multiplies a batch's loss so that the mean over the batches of an update weighs each by its examples."""
        if self.examples_per_batch is None:
            return loss
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        return loss * tf.cast(self._weight_of(x), loss.dtype)

    def _weight_of(self, x: Any) -> tf.Tensor:
        """How many times a batch counts in the mean over the batches of an update, float64, shape ()."""
        weight = tf.cast(_batch_size(x), tf.float64) / tf.cast(self.examples_per_batch, tf.float64)
        return weight if self.counts is None else weight * tf.cast(self.counts, tf.float64)

    def _result(
        self, batch: Any, loss: tf.Tensor, scope: Assignments, gradients: list[Any], logs: Sequence[tf.Tensor] = ()
    ) -> StepResult:
        state, metrics = scope.current(self.state), scope.current(self.metrics)
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        return StepResult(loss, gradients, state, metrics, _batch_size(x), list(logs))


def _fields(result: StepResult) -> tuple[Any, ...]:
    return tuple(getattr(result, field.name) for field in dataclasses.fields(result))


_build_specs: WeakKeyDictionary[keras.Model, Any] = WeakKeyDictionary()


def last_build_spec(model: keras.Model) -> Any:
    """Returns the `tf.TypeSpec`s that `ModelStep.build` last built a model for; None if it did not build it."""
    return _build_specs.get(model)


def values(variables: Sequence[keras.Variable]) -> Tensors:
    """Reads each variable once."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def _batch_size(x: Any) -> tf.Tensor:
    """Returns the number of examples in a batch's inputs, int64, shape ()."""
    return tf.shape(tf.nest.flatten(x)[0], out_type=tf.int64)[0]
