"""Keras's models, layers, losses and callbacks: private attributes, and `fit` and `predict` on a cluster."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow.core import compute_output_spec
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as keras_losses
from keras.src.models.functional import Functional as _Functional
from keras.src.random import seed_generator

from tfdist_cli.errors import UsageError
from tfdist_cli.train.tf_compat.distribute import without_strategy

Functional = _Functional
"""A model made of `keras.Input`. Seen in Keras 3.15.1: `models.functional.Functional`. Reason: Keras exports no name
for this class. Replace with: the exported name."""

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function → the function to put in its place."""
_SCORING = ("predict", "predict_on_batch", "evaluate", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")
_GLOBAL_SEED_GENERATOR = "global_seed_generator"
"""The name by which Keras keeps the process-wide seed; Keras 3.12 has no constant for it."""

CALLBACK_MODEL = "_model"
"""The attribute of a callback that `set_model` sets. Seen in Keras 3.15.1. Reason: the public property `model` is
computed from it. Replace with: a public way to save a callback's state."""
TENSORBOARD_PROCESS_ATTRIBUTES = {
    "_batch_start_time",
    "_epoch_start_time",
    "_is_tracing",
    "_previous_epoch_iterations",
    "_profiler_started",
    "_should_trace",
    "_should_write_train_graph",
    "_train_accumulated_time",
}
"""Attributes of the `TensorBoard` callback that belong to files and clocks of its process. Seen in Keras 3.15.1.
Reason: callbacks do not publish their state. Replace with: a public way to save a callback's state."""


def is_model(candidate: Any) -> bool:
    """Whether an object is a model that Keras trains: a `keras.Model`, or another layer with Keras's trainer mixed in.

    Seen in Keras 3.15.1: `TensorFlowTrainer`. Reason: `fit` and `compile` come from there. Replace with: a public
    class.
    """
    return isinstance(candidate, TensorFlowTrainer) and isinstance(candidate, keras.Layer)


def layers_of(model: keras.Model) -> list[Any]:
    """Returns a model and all layers in it, at any depth.

    Seen in Keras 3.15.1: `Layer._flatten_layers`. Reason: the public `Model.layers` stops at the first level. Replace
    with: a public method that does not.
    """
    return list(model._flatten_layers())


def layers_are_built(model: keras.Model) -> bool:
    """Whether all layers in a model have created their variables; a model without own ones may have no `call`."""
    has_own = type(model).build is not keras.Model.build
    return all(layer.built for layer in layers_of(model) if layer is not model or has_own)


def listed_logs(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns what `evaluate` returns without `return_dict`: a list of values, or a single one.

    Seen in Keras 3.15.1: `Trainer._flatten_metrics_in_order`. Reason: Keras has an order of its own for a metric with
    several values. Replace with: a public function.
    """
    return model._flatten_metrics_in_order(logs)


def seed_generators(layer: Any) -> list[Any]:
    """Returns the `keras.random.SeedGenerator`s of a layer, without those of the layers in it.

    Seen in Keras 3.15.1: `Layer._seed_generators`. Reason: `Layer.non_trainable_variables` has their state among
    others. Replace with: a public attribute.
    """
    return list(layer._seed_generators)


def recurrent_states(layer: Any) -> list[keras.Variable]:
    """Returns the states of a recurrent layer with `stateful=True`; [] for any other layer, and before it is built.

    Seen in Keras 3.15.1: `RNN.states`. Reason: Keras does not count them among the layer's variables. Replace with: a
    public list of them.
    """
    found = keras.tree.flatten(getattr(layer, "states", None)) if getattr(layer, "stateful", False) is True else []
    return [each for each in found if isinstance(each, keras.Variable)]


def embeddings_of(layer: Any) -> Any:
    """Returns the table of an `Embedding` layer; None before the layer is built.

    Seen in Keras 3.15.1: `Embedding._embeddings`. Reason: the public `embeddings` is a tensor where LoRA or
    quantization adds to the table. Replace with: a public attribute.
    """
    return getattr(layer, "_embeddings", None)


def compiled_as(model: keras.Model) -> Any:
    """Returns an object that each call of `compile` replaces; None if the model's own `compile` creates none.

    Seen in Keras 3.15.1: `Trainer._compile_config`. Reason: Keras keeps what it has traced until `compile`, and does
    not publish when that was. Replace with: a public count of compilations.
    """
    return getattr(model, "_compile_config", None)


def build(model: keras.Model, element_spec: Any) -> None:
    """Builds a model, its metrics and its optimizer for batches of this `tf.TypeSpec`.

    Seen in Keras 3.15.1: `Trainer._symbolic_build`. Reason: no public call builds all three from shapes alone. Replace
    with: one that does.
    """
    model._symbolic_build(data_batch=element_spec)


def accepts_training(model: keras.Model) -> bool:
    """Whether a model's `call` has the argument `training`.

    Seen in Keras 3.15.1: `Layer._call_has_training_arg`. Reason: a signature can hide it in `**kwargs` or a decorator.
    Replace with: a public property.
    """
    return model._call_has_training_arg


def compute_loss(model: keras.Model, **arguments: Any) -> tf.Tensor:
    """Calls `compute_loss`, also one of the user's that has no argument `training`.

    Seen in Keras 3.15.1: `Trainer._compute_loss`. Reason: the argument is optional since Keras 3.3. Replace with:
    `Model.compute_loss`, once it is not.
    """
    return model._compute_loss(**arguments)


def traced_symbolically(function: Callable[[Any], Any], element_spec: Any) -> None:
    """Calls a function with symbolic tensors; the variables that it creates are initialized at the end.

    Seen in Keras 3.15.1: `backend.compute_output_spec`. Reason: it is not public. Replace with: a public function.

    Args:
        function: the function of a batch.
        element_spec: the `tf.TypeSpec`s of a batch.
    """

    def call(*flat: Any) -> list[Any]:
        function(tf.nest.pack_sequence_as(element_spec, list(flat), expand_composites=True))
        return []

    specs = tf.nest.flatten(element_spec, expand_composites=True)
    compute_output_spec(call, *[keras.KerasTensor(spec.shape, spec.dtype.name) for spec in specs])


def stateless_scope() -> Any:
    """Returns the `keras.StatelessScope` of this thread; None if there is none.

    Seen in Keras 3.15.1: the global attribute `stateless_scope`. Reason: it is not public. Replace with: a public
    function.
    """
    return global_state.get_global_attribute("stateless_scope")


@contextlib.contextmanager
def without_stateless_scope() -> Iterator[None]:
    """Within the context, variables are read and assigned, whatever `keras.StatelessScope` is entered.

    Seen in Keras 3.15.1: the global attribute `stateless_scope`. Reason: it is not public. Replace with: a public
    context.
    """
    before = stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", before)


COMPUTES_LOSS = ("compute_loss", "_compute_loss")
"""Functions in whose frames an error is one of the loss. Seen in Keras 3.15.1: `Trainer._compute_loss`. Reason: Keras
wraps no errors of the loss. Replace with: an error class for them."""


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Returns the metric `loss` of a compiled model.

    Seen in Keras 3.15.1: `Trainer._loss_tracker`. Reason: a model of the user's can leave it out of `metrics`. Replace
    with: a public attribute.
    """
    return model._loss_tracker


def has_compiled_loss(model: keras.Model) -> bool:
    """Whether `compile` was called with a loss.

    Seen in Keras 3.15.1: `Trainer._compile_loss`. Reason: the public `Model.loss` is missing before `compile`. Replace
    with: a public property.
    """
    return model._compile_loss is not None


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns all metrics that `compile` makes, also those that a `metrics` of the user's leaves out.

    Seen in Keras 3.15.1: `Trainer._loss_tracker`, `_compile_metrics`, `_compile_loss`. Reason: Keras updates them even
    so. Replace with: a public list of what a step updates.
    """
    own = [each for each in (model._loss_tracker, model._compile_metrics) if each]
    return own + (list(model._compile_loss.metrics) if model._compile_loss else [])


def replace_losses(model: keras.Model, replace: Callable[[Any], Any]) -> None:
    """Replaces the loss of each output of a compiled model that is built.

    Seen in Keras 3.15.1: `Trainer._compile_loss`, `CompileLoss._flat_losses`. Reason: Keras keeps the losses of outputs
    nowhere else. Replace with: a public list of them.

    Args:
        model: the model.
        replace: a loss → the loss to put in its place.
    """
    compiled = model._compile_loss
    for place, term in enumerate((compiled and compiled._flat_losses) or ()):
        compiled._flat_losses[place] = term._replace(loss=replace(term.loss))


def skip_loss_scaling(within: Callable[[], bool]) -> None:
    """Keeps Keras from scaling losses by the number of replicas while `within()` holds, for the rest of the process.

    Seen in Keras 3.15.1: `losses.loss.scale_loss_for_distribution`, `unscale_loss_for_distribution`. Reason: Keras
    scales in some places (its `Loss` objects that are means, `add_loss`), and not in others (`compute_loss`). Replace
    with: a public option.
    """

    def unless(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: value if within() else scale(value)

    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        setattr(keras_losses, name, unless(getattr(keras_losses, name)))


def replace_class_functions(cross_entropy: Wrapper, argmax: Wrapper) -> None:
    """Replaces the functions by which Keras computes the loss and the accuracy of classes, for the rest of the process.

    Seen in Keras 3.15.1: `backend.tensorflow.numpy.argmax`, and calls of
    `tf.nn.sparse_softmax_cross_entropy_with_logits`. Reason: Keras has no registry of such functions. Replace with:
    nothing, once those of Keras and TensorFlow need as few passes over the scores.

    Args:
        cross_entropy: TensorFlow's function, of labels, logits and a name → the function to put in its place.
        argmax: Keras's function, of a tensor, `axis` and `keepdims` → the function to put in its place.
    """
    tf.nn.sparse_softmax_cross_entropy_with_logits = cross_entropy(tf.nn.sparse_softmax_cross_entropy_with_logits)
    keras_numpy.argmax = argmax(keras_numpy.argmax)


def initial_epoch(model: keras.Model) -> int:
    """Returns the epoch that the callback `BackupAndRestore` has restored; 0 without it.

    Seen in Keras 3.15.1: `Trainer._initial_epoch`. Reason: the callback passes it to `fit` there. Replace with: a
    public attribute.
    """
    return model._initial_epoch or 0


def build_shapes(model: keras.Model) -> dict[str, Any]:
    """Returns the shapes that a model was built with, by the name of the argument.

    Seen in Keras 3.15.1: `Layer._build_shapes_dict`. Reason: the public `get_build_config` returns them only for one
    argument. Replace with: that method, once it returns all.
    """
    return model._build_shapes_dict


def structure_of(model: keras.Model, which: Literal["inputs", "outputs"]) -> Any:
    """Returns the structure of a functional model's inputs or outputs; () for any other model.

    Seen in Keras 3.15.1: `Sequential._functional`, `Functional._inputs_struct`, `_outputs_struct`. Reason: the public
    `inputs` and `outputs` are flat, without keys. Replace with: public attributes.
    """
    functional = getattr(model, "_functional", None) or model
    return getattr(functional, f"_{which}_struct", ()) if isinstance(functional, keras.Model) else ()


def is_default(method: Any) -> bool:
    """Whether a method of a callback is the one that `keras.callbacks.Callback` defines, which does nothing.

    Seen in Keras 3.15.1: `utils.python_utils.default`, which sets `_is_default`. Reason: comparing functions is not
    enough for wrapped methods. Replace with: a public function.
    """
    return getattr(method, "_is_default", False)


def profiles_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a `TensorBoard` callback was given a `profile_batch`, which it waits for batch by batch.

    Seen in Keras 3.15.1: `TensorBoard._should_trace`. Reason: the argument is kept nowhere else. Replace with: a public
    attribute.
    """
    return bool(callback._should_trace)


def write_train_graph(callback: keras.callbacks.TensorBoard, graph: Callable[[], tf.Graph]) -> None:
    """Writes the graph of the train step, if a `TensorBoard` callback is to do so and has not done it.

    Seen in Keras 3.15.1: `TensorBoard._should_write_train_graph`, `_train_writer`. Reason: the callback takes the graph
    from the function that Keras's `fit` makes. Replace with: a public method that takes a graph.

    Args:
        callback: the callback.
        graph: returns the graph.
    """
    if callback._should_write_train_graph:
        callback._should_write_train_graph = False
        with callback._train_writer.as_default():
            tf.summary.graph(graph())


def process_wide_seeds() -> keras.random.SeedGenerator:
    """Returns the generator that random operations without a seed draw from.

    Seen in Keras 3.15.1: `random.seed_generator.global_seed_generator`. Reason: Keras publishes no state of it. Replace
    with: a public function.
    """
    return seed_generator.global_seed_generator()


UNSEEDED_FACTOR, UNSEEDED_MODULUS = 5387, 933199
"""A draw without a seed changes each number x of the generator's state to (x + 1) · factor mod modulus. Seen in Keras
3.15.1: `SeedGenerator.next(ordered=False)`. Reason: a step starts where earlier ones have ended, without taking them.
Replace with: a public function of the state after n draws."""


@contextlib.contextmanager
def global_seed_generator(generator: Any) -> Iterator[None]:
    """Within it, random operations without a seed draw from another generator.

    Seen in Keras 3.15.1: `backend.common.global_state`. Reason: `keras.utils.set_random_seed` only sets a number.
    Replace with: a public function that sets the generator.
    """
    before = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, before)


def adapt(
    strategy: tf.distribute.Strategy,
    computing: Callable[[], Any] = contextlib.nullcontext,
    *,
    compiles: bool = True,
) -> None:
    """Lets models of this strategy predict and evaluate in the calling process, and refuse to `fit`.

    Keras gives each batch to all replicas and collects what they return: with several workers it waits for calls that
    the others never make, and with parameter servers it refuses the data. `predict` and `evaluate` now run in the
    process that calls them, as without a cluster: the variables are local, or are read from the ps. `fit` would change
    them on one worker only, so it is refused.

    Seen in Keras 3.15.1: `backend.tensorflow.trainer.TensorFlowTrainer`. Reason: the methods of `keras.Model` come from
    there. Replace with: a strategy of TensorFlow's that Keras does not distribute over.

    Args:
        strategy: the strategy.
        computing: the context in which the model is called.
        compiles: whether XLA may compile the model: it cannot read variables of other tasks.
    """
    for name in _SCORING:
        method = getattr(TensorFlowTrainer, name)
        setattr(TensorFlowTrainer, name, _local(method, strategy, computing, compiles=compiles))
    for name in _TRAINING:
        setattr(TensorFlowTrainer, name, _refused(getattr(TensorFlowTrainer, name), strategy))


def adapt_batches(strategy: tf.distribute.MirroredStrategy) -> None:
    """Lets `predict_on_batch` use one replica; Keras gives the batch to each, and returns all results.

    Seen in Keras 3.15.1: `TensorFlowTrainer.predict_on_batch`. Reason: above. Replace with: nothing, once Keras
    returns each prediction once.
    """
    TensorFlowTrainer.predict_on_batch = _local(TensorFlowTrainer.predict_on_batch, strategy)


def _local(
    method: Callable[..., Any],
    strategy: tf.distribute.Strategy,
    computing: Callable[[], Any] = contextlib.nullcontext,
    *,
    compiles: bool = True,
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if model.distribute_strategy is not strategy:
            return method(model, *args, **kwargs)
        if not model.built:
            raise UsageError(
                f"the model {model.name!r} is not built, so {method.__name__} cannot run on a cluster",
                code="model-not-built",
                hint="start the model with keras.Input, or call model.build(input_shape) in tfdist.scope() on every "
                "task",
            )
        with _without_strategy(model), contextlib.nullcontext() if compiles else _without_xla(model), computing():
            return method(model, *args, **kwargs)

    return call


@contextlib.contextmanager
def _without_xla(model: keras.Model) -> Iterator[None]:
    own, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = own


@contextlib.contextmanager
def checked_between_batches(check: Callable[[], None]) -> Iterator[None]:
    """Within it, Keras's `evaluate` and `predict`, which callbacks call, call a function after each batch.

    Seen in Keras 3.15.1. Reason: only their own callbacks are called between batches, and those are the user's.
    Replace with: a public hook that is called between the batches of all models.

    Args:
        check: the function; what it raises ends the call.
    """

    class Check(keras.callbacks.Callback):
        """Calls the function."""

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 Keras's names
            check()

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            check()

    replaced = {name: getattr(keras.Model, name) for name in ("evaluate", "predict")}
    for name, method in replaced.items():
        setattr(keras.Model, name, _with_callback(method, Check))
    try:
        yield
    finally:
        for name in replaced:
            delattr(keras.Model, name)  # it is inherited from TensorFlowTrainer


def _with_callback(method: Callable[..., Any], callback: type[keras.callbacks.Callback]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("callbacks") or []
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(callback())
        else:
            own = given if isinstance(given, (list, tuple)) else [given]
            bound.arguments["callbacks"] = [*own, callback()]
        return method(*bound.args, **bound.kwargs)

    return call


def _refused(method: Callable[..., Any], strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if model.distribute_strategy is strategy:
            raise UsageError(
                f"model.{method.__name__} does not train on a cluster",
                code="keras-fit-on-cluster",
                hint="call tfdist.fit(model, data, ...) on every task",
            )
        return method(model, *args, **kwargs)

    return call


@contextlib.contextmanager
def _without_strategy(model: keras.Model) -> Iterator[None]:
    """Within it, neither TensorFlow nor the model has a strategy.

    Seen in Keras 3.15.1: `TensorFlowTrainer._distribute_strategy`. Reason: the model would distribute its batches.
    Replace with: a public setter.
    """
    own = model._distribute_strategy
    model._distribute_strategy = None
    try:
        with without_strategy():
            yield
    finally:
        model._distribute_strategy = own


def sublayers(layer: Any) -> list[keras.Layer]:
    """Returns the layers in a layer, one level deep.

    Seen in Keras 3.15.1: `Layer._flatten_layers`. Reason: `Model.layers` is public, and layers have no such list.
    Replace with: a public one.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))
