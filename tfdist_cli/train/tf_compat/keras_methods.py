"""Keras's own `predict`, `evaluate` and `fit` of a model on a cluster.

Keras gives each batch to all replicas and collects what they return: with several workers it waits for calls that the
others never make, and with parameter servers it refuses the data. Here `predict` and `evaluate` run in the process that
calls them, as in one process without a cluster: the variables are its own, or are read from the ps. `fit` would change
them behind the other workers' backs; it is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from tensorflow.python.distribute import distribute_lib

from tfdist_cli.errors import UsageError

_SCORING = ("predict", "predict_on_batch", "evaluate", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")


def adapt(strategy: tf.distribute.Strategy) -> None:
    """From now on models of this strategy predict and evaluate in the calling process, and refuse to fit."""
    for name in _SCORING:
        setattr(TensorFlowTrainer, name, _local(getattr(TensorFlowTrainer, name), strategy))
    for name in _TRAINING:
        setattr(TensorFlowTrainer, name, _refused(getattr(TensorFlowTrainer, name), strategy))


def adapt_batches(strategy: tf.distribute.MirroredStrategy) -> None:
    """From now on `predict_on_batch` gives a batch to one replica; Keras gives it to each, and returns all results."""
    TensorFlowTrainer.predict_on_batch = _local(TensorFlowTrainer.predict_on_batch, strategy)


def _local(method: Callable[..., Any], strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if model.distribute_strategy is not strategy:
            return method(model, *args, **kwargs)
        if not model.built:
            raise UsageError(
                f"the model {model.name!r} has no weights yet, so that {method.__name__} cannot run on a cluster",
                hint="begin it with keras.Input, or call model.build(input_shape) in tfdist.scope() on every task",
            )
        with _without_strategy(model):
            return method(model, *args, **kwargs)

    return call


def _refused(method: Callable[..., Any], strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if model.distribute_strategy is strategy:
            raise UsageError(
                f"model.{method.__name__} does not train on a cluster",
                hint="call tfdist.fit(model, data, ...) on every task",
            )
        return method(model, *args, **kwargs)

    return call


@contextlib.contextmanager
def _without_strategy(model: keras.Model) -> Iterator[None]:
    """Within it TensorFlow and a model take this process for all there is, also inside of a strategy's scope."""
    own = model._distribute_strategy
    # TensorFlow 2.21 leaves a scope in no public way.
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    model._distribute_strategy = None
    try:
        yield
    finally:
        model._distribute_strategy = own
        distribute_lib._pop_per_thread_mode()
