"""`fit`: Keras's `Model.fit` on the cluster that this process is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import keras
import numpy as np

from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.train.cluster.data_service.reader import DataService
from tfdist_cli.train.cluster.join import ClusterContext, join, leave_together
from tfdist_cli.train.data.comparison import check_same_arrays
from tfdist_cli.train.data.inputs import Inputs, unweighted, weighted
from tfdist_cli.train.data.length import with_length
from tfdist_cli.train.data.pipeline import repeated
from tfdist_cli.train.data.shard import DatasetFunction, checked
from tfdist_cli.train.engine.base import Engine
from tfdist_cli.train.engine.model_parallel.stages import (
    place_layers,
    placed_before_slots,
    report_most_workers,
    times_of_layers,
)
from tfdist_cli.train.engine.pacing import auto_steps_per_execution
from tfdist_cli.train.engine.reuse import LastTraining, TrainingTraits, take_last_training, type_of
from tfdist_cli.train.engine.select import agree, select_engine
from tfdist_cli.train.layers.dynamic_tables import index_variables, track_changes
from tfdist_cli.train.model.model_checks import check_compiled, check_is_traced
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.keras_model import checked_between_batches, profiles_batches
from tfdist_cli.train.trainer.arguments import check_choice, check_counts, refuse_unknown
from tfdist_cli.train.trainer.batch_callbacks import acts_on_batches
from tfdist_cli.train.trainer.checks import (
    all_tasks_used,
    check_best_weights,
    check_callbacks,
    check_evaluator,
    check_strategy_scope,
    check_targets,
    check_tasks_agree,
    check_validation,
    data_errors_explained,
    warn_of_unused_optimizers,
)
from tfdist_cli.train.trainer.config.checkpoints import CheckpointConfig, Checkpoints
from tfdist_cli.train.trainer.config.data_length import batches_per_step, worker_shards
from tfdist_cli.train.trainer.config.schedule import Schedule
from tfdist_cli.train.trainer.config.training import TrainingConfig, Verbose
from tfdist_cli.train.trainer.config.training_arguments import DEFAULT_EMBEDDINGS, TrainingArguments
from tfdist_cli.train.trainer.config.validation import Validation, ValidationArguments
from tfdist_cli.train.trainer.evaluator import run_evaluator
from tfdist_cli.train.trainer.loop import TrainingLoop
from tfdist_cli.train.trainer.reporting import ProgressReporter, enable_logging, log, progress_logged
from tfdist_cli.train.trainer.resume import StartPoint, restore_checkpoint
from tfdist_cli.train.trainer.sigterm import SigtermRequest, Terminated, end_if_terminated

MAX_UNROLLED_OPERATIONS = 16000
"""The most operations of steps in one function: compiling more of them takes longer than they save."""


def fit(  # noqa: PLR0913, PLR0917 the arguments are Keras's own, in Keras's order
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    verbose: Verbose = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    max_steps: int | None = None,
    steps_per_execution: int | None = None,
    share: Share = "split",
    checkpoints: Checkpoints | None = None,
    updates: Updates | None = None,
    learning_rate: LearningRate | None = None,
    wire: WireType = "float32",
    embeddings: EmbeddingRule | None = DEFAULT_EMBEDDINGS,
    jit: Jit = False,
    micro_batches: int = 1,
    **unknown: NoReturn,
) -> keras.callbacks.History:
    """Trains a compiled Keras 3 model on the cluster that this process is in, or in this process alone.

    Call it on every task, with a model built under `tfdist.scope()`. On an evaluator, it evaluates checkpoints instead,
    and exits the process after the last one. The positional arguments are those of Keras's `fit`. As in Keras, what a
    call has traced and compiled is used by the next ones, until `compile`, or a change of the variables or of rules.

    Args:
        model: a compiled `keras.Model`.
        x: the data: arrays, alone or in lists and dicts; a dataset, whose batches are divided among the workers; a
            `keras.utils.PyDataset`, a generator or a DataLoader, which the chief reads for the workers of parameter
            servers; or a function of a `tfdist.Shard` that returns a `tf.data.Dataset` of the shard's batches. A tuple
            without `y` is `(x, y)` or `(x, y, sample_weight)`.
        y: the targets of arrays.
        batch_size: examples in a worker's batch if the data is arrays; by default 32, or, if `steps_per_epoch` is
            given, as many as divide the examples into so many steps.
        epochs: the epoch to train to, each of `steps_per_epoch` steps; 1 if `max_steps` isn't given either.
        verbose: 0 logs no progress. Callbacks read it in `self.params`, as in Keras.
        callbacks: Keras callbacks, run on the chief: a list, or one.
        validation_split: the part of arrays, 0 to 1, that the model is evaluated on instead of trained: the last ones.
        validation_data: like `x`, or `(x, y)` or `(x, y, sample_weight)`, or a `tfdist.Validation`; evaluated after
            each epoch, each example once.
        shuffle: whether training data that is arrays, or the batches of a `PyDataset`, is shuffled. Each worker and
            each pass over the data has its own order, which is the same in every run.
        class_weight: the weight of each class, by its number, in the loss.
        sample_weight: the weights of arrays' examples.
        initial_epoch: the epoch, counted from 0, to start with; a training that resumes from a checkpoint continues
            instead.
        steps_per_epoch: global steps in an epoch; if workers are asynchronous, of all of them together. By default the
            steps of one pass over the data, which starts again when it ends; if nobody knows its length, the first pass
            shows it, or workers of parameter servers count it first. An epoch ends with the data, as in Keras.
        validation_steps: batches to evaluate, of all workers together; by default all of them.
        validation_batch_size: examples in a batch of validation arrays; by default `batch_size`.
        validation_freq: evaluates after every so many epochs, or after those in a list, counted from 1.
        max_steps: the exact global step at which the training ends; steps of earlier launches count.
        steps_per_execution: steps that a worker takes between two reports; by default up to 20 with parameter servers,
            5 there with synchronous updates, and 10 otherwise; 1 if a callback acts on batches.
        share: what each worker sees: its own part of the data (`split`), all of it (`copy`), or the batches that the
            cluster's data workers have ready next (`service`), which then run the whole input pipeline.
        checkpoints: where checkpoints are saved, and the training resumes from.
        updates: when gradients are applied on parameter servers; asynchronously by default.
        learning_rate: how the optimizer's learning rate is adjusted; not at all by default.
        wire: the type in which parameters and gradients cross the network: `float32`, `bfloat16` or `float16`.
        embeddings: which `Embedding` tables are transferred row by row, on parameter servers, between mirrored workers
            and between stages; None for none.
        jit: whether XLA compiles the forward and backward pass, and in one process the update; `"auto"` measures both
            before the training, and uses the faster one.
        micro_batches: the parts of a batch that pass through the stages of `model_parallel` one after the other.
        unknown: refused.

    Returns:
        Keras's `History`: `history.history["loss"]` has a value for each epoch.

    Raises:
        UsageError: an argument is invalid.
        TrainingError: the data, the model or a checkpoint is at fault.
    """
    refuse_unknown(unknown)
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
        micro_batches=micro_batches,
        initial_epoch=initial_epoch,
        verbose=verbose,
    )
    check_counts(1, batch_size=batch_size)
    check_choice((True, False), shuffle=shuffle)
    validating = ValidationArguments(
        validation_data, validation_split, validation_steps, validation_batch_size, validation_freq, batch_size
    )
    enable_logging()
    context = join()
    by_chief = context.environment.traits.has_ps
    data, validation = validating.divide(Inputs.of(x, y, sample_weight, class_weight=class_weight), by_chief=by_chief)
    batches = steps_per_epoch and steps_per_epoch * batches_per_step(context, arguments.updates)
    source = BatchSource(data.dataset_function(batch_size, batches=batches, shuffle=shuffle, by_chief=by_chief))
    with progress_logged(verbose != 0):
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
    _log_profiled_task(context, config)
    check_compiled(model)
    check_is_traced(model)
    check_validation(context, config.validation)
    spec = checked(config.data, worker_shards(context, config.share)[0]).element_spec
    check_targets(model, spec)
    with all_tasks_used(context, "tfdist.fit"), SigtermRequest() as sigterm:
        with context.strategy.scope():
            training = _training(context, model, spec, config)
            engine, step = training.engine, training.step
            check_best_weights(config, model)
            if engine.is_chief:
                warn_of_unused_optimizers(model)
            start, config = restore_checkpoint(engine, step, config)
        schedule = _schedule(config, engine, model, start)
        reporter = ProgressReporter(
            context.environment.run_dir, engine=engine, first=start.step, total=schedule.total, epochs=schedule.epochs
        )
        loop = TrainingLoop(engine, step, schedule, config, reporter=reporter, sigterm=sigterm)
        emit("state", state="training")
        if start.step >= schedule.total:
            log.info("nothing to train: step %d of %d is done already", start.step, schedule.total)
        try:
            with data_errors_explained(model), checked_between_batches(end_if_terminated):
                history = loop.run(start)
        except Terminated:
            # All tasks leave together: if one left first, the others' last all-reduce would fail.
            leave_together(context, done=False)
            raise
        finally:
            engine.close()
        reporter.finish()
        training.keep()
        loop.check_saved()
    return history


def _training(context: ClusterContext, model: keras.Model, spec: Any, config: TrainingConfig) -> LastTraining:
    """Returns the engine and the step to train with: those of the model's last training, or new ones."""
    last = take_last_training(model)
    traits = TrainingTraits(type_of(spec), config.rules, config.share, _has_deltas(config.checkpoints))
    reusable = last is not None and last.suits(model, traits, context.strategy)
    if agree(context, reusable) and last:
        last.engine.begin_again()
        last.step.begin_again(spec)
        log.debug("the functions of the last training are used again")
        return last
    step = ModelStep(model)
    _build(context, step, spec, config)
    _track_changes(model, config.checkpoints)
    return LastTraining.of(select_engine(context, step, spec, config.rules), step, traits, context.strategy)


def _build(context: ClusterContext, step: ModelStep, spec: Any, config: TrainingConfig) -> None:
    """Creates all variables, and places them."""
    model, stages = step.model, context.stages
    if stages:
        times = times_of_layers(stages, model, config.data, config.rules.micro_batches)
        with placed_before_slots(stages, model, times):
            step.build(spec)
        place_layers(stages, model, times)  # the layers of a model with a train_step of its own
        report_most_workers(stages, model)
    else:
        step.build(spec)
    if placement := context.placement or stages:
        placement.report(model, [*step.optimizer_variables, *index_variables(model)])


def _track_changes(model: keras.Model, checkpoints: CheckpointConfig | None) -> None:
    """Has dynamic tables record which rows change, if there are delta checkpoints."""
    if _has_deltas(checkpoints) and not track_changes(model):
        log.warning("full_every has no effect, all checkpoints are full: the model has no DynamicEmbedding")


def _has_deltas(checkpoints: CheckpointConfig | None) -> bool:
    return checkpoints is not None and checkpoints.full_every > 1


def _log_profiled_task(context: ClusterContext, config: TrainingConfig) -> None:
    """Logs which task Keras's callback profiles: the one that runs it."""
    environment = context.environment
    boards = [each for each in config.callbacks if isinstance(each, keras.callbacks.TensorBoard)]
    if environment.is_chief and environment.addresses and any(map(profiles_batches, boards)):
        log.info(
            "TensorBoard(profile_batch=...) profiles %s alone; `tfdist profile --task ROLE:INDEX` profiles any task",
            environment.task,
        )


@dataclass(frozen=True)
class BatchSource:
    """`config.DataSource` of a program: a function that maps a shard to its batches.

    Args:
        function: the function.
        lengths: the batches of shards that were counted.
    """

    function: DatasetFunction
    lengths: Mapping[tuple[int, int], int] = field(default_factory=dict)
    has_batches = True

    def elements(self) -> DatasetFunction:
        """Returns the batches of one pass over the data."""
        return self.function

    def with_lengths(self, lengths: Mapping[tuple[int, int], int]) -> BatchSource:
        """Returns the data with the length of shards, by their index and count."""
        return replace(self, lengths=lengths)

    @property
    def _counted(self) -> DatasetFunction:
        return with_length(self.function, self.lengths) if self.lengths else self.function

    def one_pass(self) -> DatasetFunction:
        """Returns the batches of one pass over the data."""
        return self._counted

    def batches(self, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on."""
        return repeated(self._counted) if repeat else self._counted

    def served_batches(self, service: DataService, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on, prepared by the cluster's data workers."""
        function, class_weight = unweighted(self.function)
        return weighted(service.whole_batches(function, self.lengths, repeat=repeat), class_weight)


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
    validation = config.validation.data if config.validation else None
    divided = {"data to train on": config.divided, "validation data": validation}
    check_same_arrays(divided, engine.total, is_chief=engine.is_chief)
    decided = engine.total(np.array([size, adapts], np.float64) * engine.is_chief)
    return Schedule(
        config.steps_per_epoch,
        config.last_step(start.origin),
        int(decided[0]),
        bool(decided[1]),
        start.origin,
        config.steps_per_pass,
    )
