"""`evaluate`: Keras's `Model.evaluate` on the cluster that this process is in."""

from __future__ import annotations

from typing import Any

import keras

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.cluster.join import join
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.pipeline import Shard, checked
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.select import select_engine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.arguments import check_counts
from tfdist_cli.train.trainer.checks import (
    all_tasks_used,
    check_is_no_evaluator,
    check_validation,
    data_errors_explained,
)
from tfdist_cli.train.trainer.config import Validation
from tfdist_cli.train.trainer.reporting import enable_logging


def evaluate(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Evaluates a compiled Keras 3 model on the cluster that this process is in, or in this process alone.

    The data is divided among the workers; each example is evaluated once. Call it on every task, as `tfdist.fit`.

    Args:
        model: a compiled `keras.Model`, built under `tfdist.scope()`.
        x: the data, as for `tfdist.fit`.
        y: the targets of arrays.
        batch_size: examples in a worker's batch if the data is arrays; by default 32.
        sample_weight: the weights of arrays' examples.
        steps: batches to evaluate, of all workers together; by default all of them.

    Returns:
        The loss and the metrics by name, as `keras.Model.evaluate(..., return_dict=True)` does: floats, or arrays if a
        metric has several values. The same on every task.

    Raises:
        UsageError: an argument is invalid, this task is an evaluator, which evaluates checkpoints, or a callback of
            mirrored workers calls it.
        TrainingError: the data or the model is at fault.
    """
    check_counts(1, batch_size=batch_size, steps=steps)
    enable_logging()
    context = join()
    check_is_no_evaluator(context, "call tfdist.evaluate after tfdist.fit")
    function = Inputs.of(x, y, sample_weight).dataset_function(batch_size, shuffle=False)
    check_validation(context, Validation(function, steps))
    step = ModelStep(model)
    spec = checked(function, Shard()).element_spec
    with all_tasks_used(context, "tfdist.evaluate"):
        with context.strategy.scope():
            step.build(spec)
            engine = select_engine(context, step, spec, Rules())
        emit("state", state="evaluating")
        with data_errors_explained(model):
            return engine.evaluate(function, steps=steps).logs()
