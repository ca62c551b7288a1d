"""Compares the public classes of Keras with the classes of the objects in the models of the zoo."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import keras

from tests.zoo.case import Case

NAMESPACES = (
    "layers",
    "optimizers",
    "optimizers.schedules",
    "losses",
    "metrics",
    "regularizers",
    "constraints",
    "initializers",
)
NOT_TRAINED = {
    "layers.FlaxLayer": "runs a JAX model, which TensorFlow does not train",
    "layers.JaxLayer": "runs a JAX model, which TensorFlow does not train",
    "layers.TorchModuleWrapper": "runs a PyTorch model, which TensorFlow does not train",
}
"""Keras classes that no TensorFlow model contains, each with the reason."""


def public_classes() -> dict[type, str]:
    """Returns Keras's public classes with names such as `layers.Dense`; of several names, that of the class itself."""
    found: dict[type, str] = {}
    for namespace in NAMESPACES:
        module = attrgetter(namespace)(keras)
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind not in found or name == kind.__name__:
                found[kind] = f"{namespace}.{name}"
    return found


def covered(cases: Iterable[tuple[str, Case]]) -> dict[str, list[str]]:
    """Returns, for each public class of Keras, the models that contain an instance of it or of a subclass."""
    names = public_classes()
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for title, case in cases:
        keras.backend.clear_session()
        keras.config.set_dtype_policy(case.policy)
        kinds = {kind for part in _parts(case) for kind in _keras_kinds(type(part), names)}
        for kind in kinds:
            found[names[kind]].append(title)
    keras.config.set_dtype_policy("float32")
    return found


def _keras_kinds(kind: type, names: dict[type, str]) -> Iterator[type]:
    if kind in names:
        yield kind
    elif not kind.__module__.startswith("keras."):
        yield from (base for base in kind.__mro__ if base in names)


def _parts(case: Case) -> Iterator[Any]:
    """Yields all objects of which a model consists."""
    model = case.build()
    pipeline = [case.pipeline()] if case.pipeline else []
    for layer in [*model._flatten_layers(), *(part for each in pipeline for part in each._flatten_layers())]:
        yield layer
        yield from _rules(layer)
        yield from vars(layer).get("_metrics", ())
    yield from _of_optimizer(model.optimizer)
    yield from _compiled(model._compile_config.config if model._compile_config else {}, model)


def _rules(layer: Any) -> Iterator[Any]:
    for name, value in vars(layer).items():
        if name.endswith(("_initializer", "_regularizer", "_constraint", "input_spec")):
            yield value
    yield getattr(layer, "input_spec", None)


def _of_optimizer(optimizer: Any) -> Iterator[Any]:
    if isinstance(optimizer, keras.optimizers.OptimizerMap):
        yield optimizer
        for each in (optimizer.default_optimizer, *optimizer.values()):
            yield from _of_optimizer(each)
    elif isinstance(optimizer, keras.optimizers.Optimizer):
        yield optimizer
        yield optimizer._learning_rate
        for name in ("inner_optimizer", "optimizer_map", "_optimizer_map"):
            yield from _of_optimizer(getattr(optimizer, name, None))


def _compiled(_config: Any, model: keras.Model) -> Iterator[Any]:
    loss, scores = model._compile_loss, model._compile_metrics
    yield from keras.tree.flatten(loss._user_loss) if loss else ()
    if scores:
        yield from keras.tree.flatten((scores._user_metrics, scores._user_weighted_metrics))
