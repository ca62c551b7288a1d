"""Checks made before a training or an evaluation begins: of the model, the data and the tasks' agreement."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TaskLost, TrainingError, UsageError
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.cluster.reachability import unreachable
from tfdist_cli.train.data.length import check_ends
from tfdist_cli.train.data.mismatch import found_in_step
from tfdist_cli.train.data.shard import checked
from tfdist_cli.train.engine.base import Engine
from tfdist_cli.train.layers.dynamic_tables import row_indices
from tfdist_cli.train.model.embeddings import unused_table_optimizers
from tfdist_cli.train.model.own_step.optimizers import overrides
from tfdist_cli.train.tf_compat.keras_model import has_compiled_loss
from tfdist_cli.train.tf_compat.op_errors import lost_ps, shortened
from tfdist_cli.train.trainer.config.data_length import worker_shards
from tfdist_cli.train.trainer.config.training import TrainingConfig
from tfdist_cli.train.trainer.config.validation import Validation

log = logging.getLogger("tfdist")

_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
"""The errors of operations on a task that is lost; the second and the third one may have other causes."""
_TRAINING = "tfdist.fit"
_running: list[str] = []
"""The call of tfdist that this process is in, if it uses all tasks."""


@contextmanager
def all_tasks_used(context: ClusterContext, call: str) -> Iterator[None]:
    """The context of a call that uses all tasks.

    Where all tasks compute each step together, a second one, by a callback, is rejected: callbacks run on the chief
    alone, so that the other tasks would not take part in it. A training within a training is rejected everywhere.

    Args:
        context: this process in its cluster.
        call: the name of the function, for the message.

    Raises:
        UsageError: it is rejected.
        TaskLost: a ps has exited, or does not answer.
    """
    together = context.environment.traits.together
    if _running and together:
        raise UsageError(
            f"{call} in a callback of {_running[0]}: it needs all tasks, and callbacks run on the chief only",
            code="call-needs-all-tasks",
            hint="call it on every task after the training; in a callback, use model.evaluate or model.predict, which "
            "run in the chief alone",
        )
    if call == _TRAINING and call in _running:
        raise UsageError(
            f"{call} while another {call} of this process runs: it trains one model at a time",
            code="training-runs",
            hint="call it after the other training, or in another process",
        )
    _running.append(call)
    try:
        yield
    except _LOST as error:
        name = "" if together else lost_ps(error) or _unreachable_ps(context)
        if name:
            raise _lost(name, error) from error
        raise
    finally:
        _running.remove(call)


def _unreachable_ps(context: ClusterContext) -> str:
    """Returns the first ps that accepts no connection; empty if all do."""
    stores = {task: address for task, address in context.environment.addresses.items() if task.traits.holds_variables}
    return next((str(task) for task, address in stores.items() if unreachable(address)), "")


def _lost(name: str, error: Exception) -> TaskLost:
    reason = shortened(error).message.removeprefix(f"{name}: ")
    return TaskLost(
        f"{name} failed or is unreachable: {reason}",
        code="task-lost",
        hint=f"see the output of {name} for the reason; then start all tasks again: checkpoints, if there are any, are "
        "continued",
    )


def check_is_no_evaluator(context: ClusterContext, hint: str) -> None:
    """Checks that this task is no evaluator, which has no part in the cluster.

    Args:
        context: this process in its cluster.
        hint: what to do instead.

    Raises:
        UsageError: it is one.
    """
    if context.environment.task.traits.evaluates:
        raise UsageError("an evaluator evaluates checkpoints only", code="not-on-evaluator", hint=hint)


def check_strategy_scope(context: ClusterContext) -> None:
    """Checks that no other strategy's scope is entered: TensorFlow does not allow one strategy within another.

    Raises:
        UsageError: the scope of a strategy that is not tfdist's is entered.
    """
    alone = context.environment.traits.current_scope  # it uses whatever strategy is the current one
    if tf.distribute.has_strategy() and (alone or tf.distribute.get_strategy() is not context.strategy):
        name = type(tf.distribute.get_strategy()).__name__
        raise UsageError(
            f"tfdist trains under its own strategy, and this is the scope of a {name}",
            code="foreign-strategy-scope",
            hint="make and compile the model under `with tfdist.scope():`, and leave the other strategy out",
        )


def check_callbacks(config: TrainingConfig) -> None:
    """Checks that callbacks and checkpoints do not both restore the training: each would undo the other's work.

    Raises:
        UsageError: there are checkpoints, and Keras's `BackupAndRestore`.
    """
    backups = [each for each in config.callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    if config.checkpoints and backups:
        raise UsageError(
            "the BackupAndRestore callback and tfdist's checkpoints would both restore the training",
            code="backup-and-checkpoints",
            hint="leave BackupAndRestore out: a training with checkpoints resumes from its last one",
        )


def check_best_weights(config: TrainingConfig, model: keras.Model) -> None:
    """Checks that no callback takes the weights of dynamic tables without knowing whose rows they are.

    Raises:
        UsageError: `EarlyStopping` is to restore the best weights, and the model has a dynamic table.
    """
    stops = (each for each in config.callbacks if isinstance(each, keras.callbacks.EarlyStopping))
    if any(each.restore_best_weights for each in stops) and row_indices(model):
        raise UsageError(
            "EarlyStopping with restore_best_weights would give rows of a DynamicEmbedding to other ids than theirs: "
            "get_weights has the rows without their ids",
            code="best-weights-of-dynamic-table",
            hint="set restore_best_weights=False; tfdist's checkpoints keep the ids, and a recipe's evaluator exports "
            "the best one (export: {best: true})",
        )


def check_targets(model: keras.Model, spec: Any) -> None:
    """Checks that the data has targets if the model's loss needs them; a `train_step` of its own may make them.

    Args:
        model: the compiled model.
        spec: the `tf.TypeSpec`s of a batch.

    Raises:
        TrainingError: there are none.
    """
    inputs_only = (not isinstance(spec, tuple) or len(spec) == 1) and not overrides(model, "train_step")
    if inputs_only and has_compiled_loss(model) and type(model).compute_loss is keras.Model.compute_loss:
        raise TrainingError(
            "the data has inputs but no targets, which the loss needs",
            code="no-targets",
            hint="yield (x, y), or compile the model without a loss and add its own with add_loss or compute_loss",
        )


def warn_of_unused_optimizers(model: keras.Model) -> None:
    """Logs the tables of KerasRS whose own optimizer does not update them."""
    for table, optimizer in unused_table_optimizers(model).items():
        log.warning(
            "the table %s has %s as its optimizer, which KerasRS uses on TPUs only: the model's %s updates it; give "
            "model.compile a keras.optimizers.MultiOptimizer to update it by its own",
            table,
            optimizer,
            type(model.optimizer).__name__,
        )


def check_validation(context: ClusterContext, validation: Validation | None) -> None:
    """Checks the data to evaluate.

    Raises:
        TrainingError: it never ends, is not a dataset, or ignores the shard.
    """
    if validation is None:
        return
    shard = worker_shards(context, "split")[0]
    if validation.steps is None:
        check_ends(validation.data, shard)
    else:
        checked(validation.data, shard)


def check_tasks_agree(config: TrainingConfig, engine: Engine) -> None:
    """Checks that all tasks train equally long: otherwise they would wait for each other forever.

    Raises:
        TrainingError: this task's configuration differs from the chief's.
    """
    validation, checkpoints = config.validation, config.checkpoints
    lengths = {
        "steps_per_epoch": config.steps_per_epoch,
        "the last step": config.last_step(),
        "the steps of a pass over the data": config.steps_per_pass or 0,
        "epochs between validations": validation.every_epochs if validation else 0,
        "steps between checkpoints": (checkpoints.every_steps or 0) if checkpoints else 0,
    }
    values = np.array(list(lengths.values()), np.float64)
    for (name, value), chiefs in zip(lengths.items(), engine.total(values * engine.is_chief), strict=True):
        if value != chiefs:
            raise TrainingError(
                f"the tasks disagree on {name}: it is {value} on this task and {chiefs:.0f} on the chief",
                code="tasks-disagree",
                hint="give tfdist.fit the same data and arguments on every task",
            )


def check_evaluator(
    validation: Validation | None, folder: CheckpointFolder | None
) -> tuple[Validation, CheckpointFolder]:
    """Returns an evaluator's data and the folder of its checkpoints.

    Raises:
        UsageError: one of them is missing.
    """
    hint = (
        "give a recipe 'checkpoint: {every_seconds: 60}' and 'evaluate: {}', and tfdist.fit checkpoints and "
        "validation_data; or remove the evaluator role"
    )
    if validation is None:
        raise UsageError(
            "the evaluator has no data to evaluate checkpoints on", code="evaluator-without-validation", hint=hint
        )
    if folder is None:
        raise UsageError(
            "the evaluator has no checkpoints to evaluate: the training saves none",
            code="evaluator-without-checkpoints",
            hint=hint,
        )
    return validation, folder


@contextmanager
def data_errors_explained(model: keras.Model) -> Iterator[None]:
    """Translates an op error caused by the data into an error that names the element.

    Raises:
        TrainingError: an id outside of a table, a label that the model has no output for, strings, wrong shapes.
    """
    try:
        yield
    except tf.errors.OpError as error:
        explained = found_in_step(model, error)
        if explained is None:
            raise
        raise explained from error
