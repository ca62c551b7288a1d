"""`predict`: Keras's `Model.predict` on the cluster that this process is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.strategies import EngineName
from tfdist_cli.train.cluster.join import ClusterContext, join
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.python_data.dataset_function import PythonData
from tfdist_cli.train.data.python_data.sources import is_python_data
from tfdist_cli.train.prediction.function import Leaves, joined
from tfdist_cli.train.prediction.groups import Groups
from tfdist_cli.train.prediction.hooks import Hooks
from tfdist_cli.train.prediction.mirrored import predict_mirrored
from tfdist_cli.train.prediction.parameter_server import predict_on_workers
from tfdist_cli.train.tf_compat.distribute import strategy_of
from tfdist_cli.train.trainer.arguments import as_callbacks, check_choice, check_counts
from tfdist_cli.train.trainer.checks import all_tasks_used, check_is_no_evaluator, data_errors_explained
from tfdist_cli.train.trainer.config.data_length import worker_shards
from tfdist_cli.train.trainer.config.training import Verbose
from tfdist_cli.train.trainer.reporting import enable_logging


def predict(
    model: keras.Model,
    data: Any,
    batch_size: int | None = None,
    verbose: Verbose = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Predicts with a Keras 3 model on the cluster that this process is in, or in this process alone.

    Every worker reads all of the data and predicts some of its batches, so each example is predicted once. Call it on
    every task, as `tfdist.fit`.

    Args:
        model: a `keras.Model`, built under `tfdist.scope()`. It need not be compiled.
        data: inputs `x`: an array, or several in a list or dict; or what `tfdist.fit` takes, whose targets are ignored.
            A function is called with a `tfdist.Shard` of all the data. It has the same order on every task.
        batch_size: examples in a batch if the data is arrays; by default 32, or what divides them into `steps` batches.
        verbose: what callbacks read in `self.params`; nothing is printed.
        steps: batches to predict; by default all of them.
        callbacks: Keras callbacks, whose predict hooks run on the chief: a list, or one.

    Returns:
        The predictions in the order of the data, as `keras.Model.predict` returns them: an array, or several in the
        structure of the model's outputs; a `tf.RaggedTensor` if batches have been padded to different lengths. The
        same on every task.

    Raises:
        UsageError: an argument is invalid, this task is an evaluator, or a callback of mirrored workers calls it.
        TrainingError: the data or the model is at fault.
    """
    check_counts(1, batch_size=batch_size, steps=steps)
    check_choice(get_args(Verbose), verbose=verbose)
    listed = as_callbacks(callbacks)
    enable_logging()
    context = join()
    check_is_no_evaluator(context, "call tfdist.predict in the program of the other tasks")
    inputs = Inputs.of(_with_inputs(data), name="data")
    function = inputs.dataset_function(batch_size if inputs.arrays else None, batches=steps, shuffle=False)
    if isinstance(function, PythonData) and context.environment.traits.has_ps:
        raise UsageError(
            "only the chief can read a generator, a PyDataset or a DataLoader, and every worker reads what it predicts",
            code="python-data-on-workers",
            hint="pass arrays, a dataset or a function of a tfdist.Shard; or call model.predict in the chief",
        )
    with all_tasks_used(context, "tfdist.predict"), data_errors_explained(model):
        hooks = Hooks(context, model, listed, verbose)
        size = model.steps_per_execution if hooks.each_batch else None
        groups = Groups.of(function, len(worker_shards(context, "split")), steps, size)
        _build(context, model, groups.input_spec)
        emit("state", state="predicting")
        predictor = _PREDICTORS[context.environment.traits.engine]
        outputs, found = hooks.called(groups, partial(predictor, context, model, groups))
        return _whole(outputs, found)


_Predictor = Callable[[ClusterContext, keras.Model, Groups], tuple[Any, Iterator[Leaves]]]
_PREDICTORS: Mapping[EngineName, _Predictor] = {
    "parameter_server": predict_on_workers,
    "mirrored": predict_mirrored,
    "model_parallel": predict_mirrored,
}
"""Functions that predict groups in order: they return the `tf.TensorSpec`s of the outputs, and each group's arrays."""


def _with_inputs(data: Any) -> Any:
    """Returns data whose arrays are inputs: a tuple has targets, too."""
    if (
        isinstance(data, (tf.data.Dataset, tuple))
        or is_python_data(data)
        or (callable(data) and not hasattr(data, "shape"))
    ):
        return data
    return (data,)


def _build(context: ClusterContext, model: keras.Model, input_spec: Any) -> None:
    """Creates the variables of a model that has none yet, and checks where they were created.

    Raises:
        TrainingError: outside of the scope of the cluster.
    """
    with context.strategy.scope():
        if not model.built:
            model(tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), input_spec))
        if not tf.distribute.has_strategy():
            return
        outside = [each.path for each in model.variables if strategy_of(each.value) is not context.strategy]
    if outside:
        raise TrainingError(
            f"{outside[0]} was created outside of the scope of the cluster",
            code="created-outside-scope",
            hint="create the model and its layers under `with tfdist.scope():`",
        )


def _whole(outputs: Any, groups: list[Leaves]) -> Any:
    """Returns all predictions in the structure of the outputs."""
    specs = tf.nest.flatten(outputs)
    none = [[np.zeros([size or 0 for size in spec.shape], spec.dtype.as_numpy_dtype)] for spec in specs]
    columns = zip(*(groups or [none]), strict=True)
    return tf.nest.pack_sequence_as(outputs, [joined([*chain.from_iterable(column)]) for column in columns])
