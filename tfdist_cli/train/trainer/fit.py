"""`fit`: Keras's `Model.fit` on the cluster that this process is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import keras
import numpy as np

from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.train.cluster.data_service import DataService
from tfdist_cli.train.cluster.join import ClusterContext, join, leave_together
from tfdist_cli.train.data.pipeline import ArrayBatches, DatasetFunction, as_dataset_function, checked, repeated
from tfdist_cli.train.engine.base import Engine
from tfdist_cli.train.engine.pacing import auto_steps_per_execution
from tfdist_cli.train.engine.select import select_engine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.arguments import check_choice, check_counts, refuse_unknown
from tfdist_cli.train.trainer.batch_callbacks import acts_on_batches
from tfdist_cli.train.trainer.checks import (
    all_tasks_used,
    check_callbacks,
    check_evaluator,
    check_strategy_scope,
    check_targets,
    check_tasks_agree,
    check_validation,
    data_errors_explained,
)
from tfdist_cli.train.trainer.config import (
    DEFAULT_EMBEDDINGS,
    Checkpoints,
    Schedule,
    TrainingArguments,
    TrainingConfig,
    Validation,
    worker_shards,
)
from tfdist_cli.train.trainer.evaluator import run_evaluator
from tfdist_cli.train.trainer.loop import TrainingLoop
from tfdist_cli.train.trainer.reporting import ProgressReporter, enable_logging, log
from tfdist_cli.train.trainer.resume import StartPoint, restore_checkpoint
from tfdist_cli.train.trainer.sigterm import SigtermRequest, Terminated

MAX_UNROLLED_OPERATIONS = 16000
"""The most operations of steps in one function: compiling more of them takes longer than they save."""


def fit(  # noqa: PLR0913 the arguments are Keras's own, under Keras's names
    model: keras.Model,
    data: Any,
    *more: NoReturn,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    max_steps: int | None = None,
    steps_per_execution: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    share: Share = "split",
    validation_data: Any = None,
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
    checkpoints: Checkpoints | None = None,
    updates: Updates | None = None,
    learning_rate: LearningRate | None = None,
    wire: WireType = "float32",
    embeddings: EmbeddingRule | None = DEFAULT_EMBEDDINGS,
    jit: Jit = False,
    **unknown: NoReturn,
) -> keras.callbacks.History:
    """Trains a compiled Keras 3 model on the cluster that this process is in, or in this process alone.

    Call it on every task, with a model built under `tfdist.scope()`. On an evaluator, it evaluates checkpoints instead,
    and exits the process after the last one.

    Args:
        model: a compiled `keras.Model`.
        data: a function of a `tfdist.Shard` that returns a `tf.data.Dataset` of the shard's batches; a dataset, whose
            batches are divided among the workers; or arrays `(x, y)` or `(x, y, sample_weight)`.
        epochs: epochs of `steps_per_epoch` steps; 1 if `max_steps` isn't given either.
        steps_per_epoch: global steps in an epoch; if workers are asynchronous, of all of them together. By default the
            steps of one pass over the data, which then starts again with each epoch. If it is given, the data is used
            as it is, and it is an error if it ends too early.
        max_steps: the exact global step at which the training ends; steps of earlier launches count.
        steps_per_execution: steps that a worker takes between two reports; by default up to 20 with parameter servers
            and 10 otherwise, or 1 if a callback acts on batches.
        batch_size: examples in a worker's batch if the data is arrays, and in a batch of validation arrays; by default
            32.
        shuffle: whether training data that is arrays is shuffled. Each worker and each pass over the data has its own
            order, which is the same in every run.
        share: what each worker sees: its own part of the data (`split`), all of it (`copy`), or the batches that the
            cluster's data workers have ready next (`service`), which then run the whole input pipeline.
        validation_data: like `data`, or a `tfdist.Validation`; evaluated after each epoch, each example once.
        callbacks: Keras callbacks, run on the chief: a list, or one.
        checkpoints: where checkpoints are saved, and the training resumes from.
        updates: when gradients are applied on parameter servers; asynchronously by default.
        learning_rate: how the optimizer's learning rate is adjusted; not at all by default.
        wire: the type in which parameters and gradients cross the network: `float32`, `bfloat16` or `float16`.
        embeddings: which `Embedding` tables are transferred row by row on parameter servers; None for none.
        jit: whether XLA compiles the forward and backward pass; `"auto"` measures both before the training, and uses
            the faster one.
        more: refused; Keras's `fit` takes the targets here.
        unknown: refused, with a hint at what to write instead of Keras's arguments that `tfdist.fit` does not have.

    Returns:
        Keras's `History`: `history.history["loss"]` has a value for each epoch.

    Raises:
        UsageError: an argument is invalid.
        TrainingError: the data, the model or a checkpoint is at fault.
    """
    refuse_unknown(more, unknown)
    arguments = TrainingArguments(
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        max_steps=max_steps,
        steps_per_execution=steps_per_execution,
        share=share,
        callbacks=callbacks,
        checkpoints=checkpoints,
        updates=updates,
        learning_rate=learning_rate,
        wire=wire,
        embeddings=embeddings,
        jit=jit,
    )
    check_counts(1, batch_size=batch_size)
    check_choice((True, False), shuffle=shuffle)
    enable_logging()
    context = join()
    source = BatchSource.of(data, batch_size, shuffle=shuffle)
    validation = _as_validation(validation_data, batch_size)
    if context.environment.task.traits.evaluates:
        _evaluate_checkpoints(context, model, validation, checkpoints)
    return train(context, model, arguments.configure(context, source, validation))


def train(context: ClusterContext, model: keras.Model, config: TrainingConfig) -> keras.callbacks.History:
    """Trains a model that was built under the strategy's scope.

    Raises:
        TrainingError: the data, the model or a checkpoint is at fault.
        ResultNotSaved: the training is complete, and its last checkpoint could not be written.
        Terminated: the process received SIGTERM.
    """
    config = config.within_keras_limits()
    check_strategy_scope(context)
    check_callbacks(config)
    step = ModelStep(model)
    check_validation(context, config.validation)
    spec = checked(config.data, worker_shards(context, config.share)[0]).element_spec
    check_targets(model, spec)
    with all_tasks_used(context, "tfdist.fit"), SigtermRequest() as sigterm:
        with context.strategy.scope():
            step.build(spec)
            if context.placement:
                context.placement.report(model)
            engine = select_engine(context, step, spec, config.rules)
            start = restore_checkpoint(engine, step, config)
        schedule = _schedule(config, engine, model, start)
        reporter = ProgressReporter(
            context.environment.run_dir, engine=engine, first=start.step, total=schedule.total, epochs=schedule.epochs
        )
        loop = TrainingLoop(engine, step, schedule, config, reporter=reporter, sigterm=sigterm)
        emit("state", state="training")
        if start.step >= schedule.total:
            log.info("nothing to train: step %d of %d is done already", start.step, schedule.total)
        try:
            with data_errors_explained(model):
                history = loop.run(start)
        except Terminated:
            # All tasks leave together: if one left first, the others' last all-reduce would fail.
            leave_together(context, done=False)
            raise
        finally:
            engine.close()
        reporter.finish()
        loop.check_saved()
    return history


@dataclass(frozen=True)
class BatchSource:
    """`config.DataSource` of a program: a function that maps a shard to its batches."""

    function: DatasetFunction

    @classmethod
    def of(cls, data: Any, batch_size: int | None, *, shuffle: bool) -> BatchSource:
        """Returns the source of what a program passes to `fit`.

        Raises:
            UsageError: a batch size is given, and the data comes in batches.
            TrainingError: it is not data that `fit` takes.
        """
        function = as_dataset_function(data, batch_size, shuffle=shuffle)
        if batch_size is not None and not isinstance(function, ArrayBatches):
            raise UsageError(
                "batch_size is for arrays, and this data comes in batches",
                code="batch-size-without-arrays",
                hint=f"leave batch_size out; dataset.batch({batch_size}) makes batches",
            )
        return cls(function)

    def one_pass(self) -> DatasetFunction:
        """Returns the batches of one pass over the data."""
        return self.function

    def batches(self, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on."""
        return repeated(self.function) if repeat else self.function

    def served_batches(self, service: DataService, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on, prepared by the cluster's data workers."""
        return service.whole_batches(self.function, repeat=repeat)


def _as_validation(data: Any, batch_size: int | None) -> Validation | None:
    if data is None:
        return None
    validation = data if isinstance(data, Validation) else Validation(data)
    return replace(validation, data=as_dataset_function(validation.data, batch_size))


def _evaluate_checkpoints(
    context: ClusterContext, model: keras.Model, validation: Validation | None, checkpoints: Checkpoints | None
) -> NoReturn:
    data, folder = check_evaluator(validation, checkpoints.config().folder if checkpoints else None)
    run_evaluator(model, data, folder, context.environment.run_dir)
    raise SystemExit(0)


def _schedule(config: TrainingConfig, engine: Engine, model: keras.Model, start: StartPoint) -> Schedule:
    size = config.steps_per_execution
    if size is None and model.steps_per_execution > 1:
        size = model.steps_per_execution
    if size is None and any(acts_on_batches(callback) for callback in config.callbacks):
        size = 1
    adapts = size is None
    if size is None:
        sharers = 1 if engine.synchronous else engine.workers
        most = max(1, min(engine.max_steps_per_execution, MAX_UNROLLED_OPERATIONS // engine.operations()))
        size = auto_steps_per_execution(config.steps_per_epoch, sharers, most)
    check_tasks_agree(config, engine)
    decided = engine.total(np.array([size, adapts], np.float64) * engine.is_chief)
    return Schedule(
        config.steps_per_epoch, config.last_step(start.origin), int(decided[0]), bool(decided[1]), start.origin
    )
