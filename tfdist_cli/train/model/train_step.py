"""A compiled Keras model as pure functions of the values of its variables.

Engines differ in where variables live, how gradients meet and who updates; none of them differs in what a step is. So
the step reads no variable and writes none: values go in, a loss, gradients and new values come out. Within Keras's
scope for that, the model is called as Keras's TensorFlow trainer calls it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data import mismatch
from tfdist_cli.train.model import losses
from tfdist_cli.train.model.additivity import adds_up
from tfdist_cli.train.model.assignments import Assignments, seeded_draws_only
from tfdist_cli.train.model.compute_device import DeviceScope
from tfdist_cli.train.model.step_trace import StepTrace, unknown
from tfdist_cli.train.optimizers.apply import innermost
from tfdist_cli.train.tf_compat.user_code import is_from_users_code
from tfdist_cli.train.variables.sharding import parts
from tfdist_cli.train.variables.weight_tensors import functions_inlined

Tensors = list[tf.Tensor]
Given = Callable[[Tensors], AbstractContextManager[Tensors]]
"""How the values that a step is given become those that its model is called with; see `EmbeddingTables.given`."""


@dataclass(frozen=True)
class StepResult:
    """What one batch gives.

    Args:
        loss: the batch's, without loss scaling, shape (); the mean over an update's batches is that of them all.
        gradients: one per trainable variable: a tensor, `tf.IndexedSlices`, or None where it has no part in the loss.
        state: the new value of each non-trainable variable.
        metrics: the new value of each metric variable.
        examples: the number of examples, int64, shape ().
    """

    loss: tf.Tensor
    gradients: list[Any]
    state: Tensors
    metrics: Tensors
    examples: tf.Tensor


class ModelStep:
    """The pure functions of one compiled model.

    Args:
        model: a compiled Keras model.

    Raises:
        TrainingError: the model is not compiled, or has a `train_step` of its own.
    """

    def __init__(self, model: keras.Model) -> None:
        _check(model)
        self.model = model
        self.jit = False
        """Whether XLA compiles training steps; only steps that are `given` nothing."""
        self.device_scope: DeviceScope = contextlib.nullcontext
        """Where an engine has the model computed."""
        self.batches = 1
        """How many batches, of which a training step sees one, make an update together."""
        self.summed = False
        """Whether their gradients are summed up, so that each is to be a part of the mean, or averaged."""
        self._traces: dict[tuple[str, bool], StepTrace] = {}
        self._compiled = tf.function(
            partial(self._train, given=contextlib.nullcontext), jit_compile=True, autograph=False
        )

    def build(self, element_spec: Any) -> None:
        """Creates all variables of model, metrics and optimizer.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.

        Raises:
            TrainingError: the model cannot take such a batch, or was not made under the strategy's scope.
        """
        _check_scope(self.model)
        mismatch.check_types(self.model, element_spec)
        _built_for[self.model] = element_spec
        # Keras has no public call that builds model, metrics and optimizer from shapes alone.
        try:
            self.model._symbolic_build(data_batch=element_spec)
        except (ValueError, RuntimeError, TypeError) as error:
            if is_from_users_code(error):
                raise
            raise mismatch.explained(self.model, element_spec, error) from error
        losses.combine_by_reduction(self.model)

    @property
    def parameters(self) -> list[keras.Variable]:
        """The variables that are learned."""
        return list(self.model.trainable_variables)

    @property
    def state(self) -> list[keras.Variable]:
        """The variables that have no gradient: moving statistics, random seeds, and what is not trained."""
        return list(self.model.non_trainable_variables)

    @property
    def metrics(self) -> list[keras.Variable]:
        """The variables that metrics, the loss among them, count in."""
        return list(self.model.metrics_variables)

    def train(
        self,
        parameters: Tensors,
        state: Tensors,
        metrics: Tensors,
        batch: Any,
        given: Given = contextlib.nullcontext,
    ) -> StepResult:
        """Loss, gradients with respect to `parameters`, and new values for one batch."""
        if self.jit:
            return self.by_xla(parameters, state, metrics, batch)
        with self.device_scope():
            return StepResult(*self._train(parameters, state, metrics, batch, given))

    def by_xla(self, parameters: Tensors, state: Tensors, metrics: Tensors, batch: Any) -> StepResult:
        """The same, compiled by XLA."""
        with self.device_scope():
            return StepResult(*self._compiled(parameters, state, metrics, batch))

    def _train(
        self, parameters: Tensors, state: Tensors, metrics: Tensors, batch: Any, given: Given
    ) -> tuple[Any, ...]:
        with given(parameters) as whole, self._holding(whole, state, metrics) as scope:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(parameters)
                minimized, reported = self._losses(batch, training=True)
                part = minimized / self.batches if self.summed and self.batches > 1 else minimized
                scaled = self.model.optimizer.scale_loss(part)
            # With the values still in place: where a gradient recomputes a part of the model, layers are called again.
            gradients = tape.gradient(scaled, parameters)
        result = self._result(batch, reported, scope, gradients)
        return tuple(getattr(result, field.name) for field in dataclasses.fields(result))

    def evaluate(
        self,
        parameters: Tensors,
        state: Tensors,
        metrics: Tensors,
        batch: Any,
        given: Given = contextlib.nullcontext,
    ) -> StepResult:
        """Loss and metrics of one batch, with nothing learned; `gradients` is empty."""
        with self.device_scope(), given(parameters) as whole, self._holding(whole, state, metrics) as scope:
            _, loss = self._losses(batch, training=False)
        return self._result(batch, loss, scope, [])

    def operations(self, element_spec: Any) -> int:
        """How many operations a training step has, for batches of this `tf.TypeSpec`; its update is not counted."""
        return self._traced(element_spec).operations

    def assigned(self, element_spec: Any) -> tuple[int, ...]:
        """The places in `state` of the variables that a training step assigns: the others are the user's alone."""
        return self._traced(element_spec).assigned

    def assigned_by_scores(self, element_spec: Any) -> dict[int, bool]:
        """The places in `state` of the variables that scoring a batch assigns, and whether it only adds to them."""
        trace = self._traced(element_spec, training=False) if self.state else None
        return dict(zip(trace.assigned, trace.adds, strict=True)) if trace else {}

    def increments(self, element_spec: Any, places: Sequence[int], *, training: bool = True) -> list[np.ndarray]:
        """How much a step adds to counters among the state, whatever its batch is.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            places: the counters' places in `state`.
            training: whether the step trains, or only scores.

        Raises:
            TrainingError: it depends on the batch, or on something else that a step computes.
        """
        return self._traced(element_spec, training=training).increments(self.state, places) if places else []

    def _traced(self, element_spec: Any, *, training: bool = True) -> StepTrace:
        key = repr(element_spec), training
        found = self._traces.get(key)
        if found is None:
            found = self._traces[key] = StepTrace(self, element_spec, training=training)
            if training:
                self._check_trained(element_spec, found.untrained)
        return found

    def _check_trained(self, element_spec: Any, untrained: Sequence[int]) -> None:
        """Refuses weights that Keras trains and that get no gradient here.

        Args:
            element_spec: the `tf.TypeSpec`s of a batch.
            untrained: the places in `parameters` of those that get no gradient.

        Raises:
            TrainingError: there is one.
        """
        lost = [place for place in untrained if place in _trained_by_keras(self, element_spec, untrained)]
        if lost:
            raise TrainingError(
                f"{self.parameters[lost[0]].path!r} is part of the loss, but its gradient is lost in this step",
                hint="use the layer's weight itself in call(), not the tf.Variable beneath it (its value in build())",
            )
        if untrained and len(untrained) == len(self.parameters):
            raise TrainingError(
                f"none of the weights of {self.model.name!r} has a gradient: the loss does not depend on them",
                hint="compute the loss from what the model returns, without stop_gradient or rounding in between",
            )

    @contextlib.contextmanager
    def _holding(self, parameters: Tensors, state: Tensors, metrics: Tensors) -> Iterator[Assignments]:
        """Within it, the model's variables have these values, and what is assigned to them is kept in the scope."""
        metrics = [tf.identity(value) for value in metrics]  # each a tensor of its own, to be followed in the graph
        variables = [*self.parameters, *self.state, *self.metrics]
        pairs = list(zip(variables, [*parameters, *state, *metrics], strict=True))
        with Assignments(pairs) as scope, seeded_draws_only(), functions_inlined():
            yield scope
        scope.check(self.model)
        if not tf.executing_eagerly():
            _check_sums(self.metrics, metrics, scope.current(self.metrics))

    def _losses(self, batch: Any, *, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Calls the model and its metrics; returns the loss to be minimized, and the one to be reported."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        model = self.model
        with losses.one_of(self.batches if training else 1):
            # Not `stateless_call`, which calls `call` itself, past all that `__call__` does: it tells the layers within
            # of `training`, casts the inputs and adds the model's own regularizer of activities.
            y_pred = model(x, **({"training": training} if model._call_has_training_arg else {}))
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training)
            model._loss_tracker.update_state(loss, sample_weight=tf.cast(_examples(x), tf.float32))
            logs = model.compute_metrics(x, y, y_pred, weight)
            _check_logs(model, logs)
            minimized = losses.minimized(loss)
        return minimized, tf.cast(tf.reduce_mean(loss) if loss.shape.rank else loss, tf.float32)

    def _result(self, batch: Any, loss: tf.Tensor, scope: Assignments, gradients: list[Any]) -> StepResult:
        state, counted = scope.current(self.state), scope.current(self.metrics)
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        return StepResult(loss, gradients, state, counted, _examples(x))


def _trained_by_keras(step: ModelStep, element_spec: Any, places: Sequence[int]) -> set[int]:
    """Those of some parameters that get a gradient where the model reads the variables themselves, as in Keras's `fit`.

    Args:
        step: the model's pure functions, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        places: the parameters, by their numbers.
    """
    found: set[int] = set()
    pieces = {place: parts(step.parameters[place]) for place in places}

    def traced(*flat: tf.Tensor) -> list[Any]:
        batch = tf.nest.pack_sequence_as(element_spec, flat, expand_composites=True)
        kept = [*step.state, *step.metrics]
        replica = tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
        with replica, Assignments([(variable, unknown(variable)) for variable in kept]), seeded_draws_only():
            with functions_inlined(), tf.GradientTape() as tape:
                loss, _ = step._losses(batch, training=True)
            gradients = tape.gradient(loss, pieces)
        found.update(place for place, each in gradients.items() if any(gradient is not None for gradient in each))
        return [loss]

    if places:
        tf.compat.v1.wrap_function(traced, tf.nest.flatten(element_spec, expand_composites=True))
    return found


_built_for: WeakKeyDictionary[keras.Model, Any] = WeakKeyDictionary()


def built_for(model: keras.Model) -> Any:
    """The `tf.TypeSpec`s of the batches that a model was last built for here; None if it was not."""
    return _built_for.get(model)


def values(variables: Sequence[keras.Variable]) -> Tensors:
    """Each variable read once."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def _examples(x: Any) -> tf.Tensor:
    """How many examples a batch's inputs have, int64, shape ()."""
    return tf.shape(tf.nest.flatten(x)[0], out_type=tf.int64)[0]


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TrainingError(
            f"{type(model).__name__} is no Keras model", hint="return a keras.Model that compile() was called on"
        )
    if not model.compiled or model.optimizer is None:
        raise TrainingError(
            f"the model {model.name!r} is not compiled", hint="call model.compile(optimizer, loss, metrics) on it"
        )
    for method in ("train_step", "test_step"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise TrainingError(
                f"{type(model).__name__} overrides {method}, which no distributed engine can run",
                hint="put what it does into compute_loss() or call(); optimizer, metrics and add_loss are used as they "
                "are",
            )


def _check_scope(model: keras.Model) -> None:
    if not tf.distribute.has_strategy():
        return
    strategy, optimizer = tf.distribute.get_strategy(), innermost(model.optimizer)
    makers = {f"the model {model.name!r}": model._distribute_strategy}
    makers[f"its optimizer {optimizer.name!r}"] = optimizer._distribution_strategy
    makers |= {variable.path: getattr(variable.value, "_distribute_strategy", None) for variable in model.variables}
    for what, maker in makers.items():
        if maker is not strategy:
            raise TrainingError(
                f"{what} was not made for this cluster",
                hint="make the model, its layers and its optimizer, and compile it, under `with tfdist.scope():`",
            )


def _check_logs(model: keras.Model, logs: dict[str, Any]) -> None:
    """Refuses results that are one batch's, not the metrics'.

    Raises:
        TrainingError: `compute_metrics` was overridden, and returns more or less than the metrics' results.
    """
    if type(model).compute_metrics is keras.Model.compute_metrics:
        return
    differing = sorted(logs.keys() ^ model.get_metrics_result().keys())
    if differing:
        raise TrainingError(
            f"{type(model).__name__}.compute_metrics() and get_metrics_result() differ in {', '.join(differing)}",
            hint="override get_metrics_result(), which follows from what metrics have counted, and update the metrics "
            "in compute_metrics()",
        )


def _check_sums(variables: list[keras.Variable], given: Tensors, counted: Tensors) -> None:
    for variable, adds in zip(variables, adds_up(given, counted), strict=True):
        if not adds:
            raise TrainingError(
                f"the metric variable {variable.path!r} is more than a sum over batches, so what several workers "
                "count cannot be added up",
                hint="only add to it, variable.assign_add(...), and do the rest in the metric's result()",
            )
