"""`fit`: Keras's `Model.fit` for whatever cluster this process is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.path_scheme import refuse_scheme
from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.spec.strategies import computes_gradients
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.writer import Asynchronous
from tfdist_cli.train.cluster.data_service import DataService
from tfdist_cli.train.cluster.join import ClusterContext, join, leave_together
from tfdist_cli.train.data.mismatch import found_in_step
from tfdist_cli.train.data.pipeline import (
    ArrayBatches,
    DatasetFunction,
    Shard,
    as_dataset_function,
    check_ends,
    checked,
    repeated,
    steps_in,
)
from tfdist_cli.train.engine.base import Engine, Rules
from tfdist_cli.train.engine.pacing import auto_steps_per_execution
from tfdist_cli.train.engine.select import select_engine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.keras_model import has_compiled_loss
from tfdist_cli.train.trainer.arguments import (
    as_callbacks,
    check_choice,
    check_counts,
    check_kind,
    refuse_unknown,
)
from tfdist_cli.train.trainer.batch_callbacks import acts_on_batches
from tfdist_cli.train.trainer.config import Saving, Schedule, TrainingConfig, Validation
from tfdist_cli.train.trainer.evaluator import run_evaluator
from tfdist_cli.train.trainer.loop import TrainingLoop
from tfdist_cli.train.trainer.reporting import Progress, log, speak
from tfdist_cli.train.trainer.resume import Start, resume
from tfdist_cli.train.trainer.sigterm import Terminated, Termination

DEFAULT_EMBEDDINGS = EmbeddingRule()
UNROLLED_OPERATIONS = 16000
"""Operations of steps that one function has at the most: more take longer to compile than they save."""
AUTO_EPOCH_HINT = "give steps_per_epoch: the data does not say how long it is"


@dataclass(frozen=True)
class Checkpoints:
    """Where `fit` keeps checkpoints, goes on from, and when it saves them.

    Args:
        dir: the folder; training goes on from the newest checkpoint found there.
        every_steps: save each time this many global steps are done.
        every_seconds: save each time this many seconds have passed.
        keep: how many of the newest stay.
        asynchronous: whether training goes on while one is written; `auto`: where no task has to keep more than 1 GiB
            of variables a second time for it.
    """

    dir: str | Path
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    asynchronous: Asynchronous = "auto"

    def __post_init__(self) -> None:
        check_counts(1, every_steps=self.every_steps, keep=self.keep)
        refuse_scheme(self.dir)

    def saving(self) -> Saving:
        """The same for the loop."""
        folder = CheckpointFolder(Path(self.dir), self.keep)
        return Saving(folder, self.every_steps, self.every_seconds, self.asynchronous)


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

    Call it on every task, with a model built under `tfdist.scope()`. On an evaluator it scores checkpoints instead, and
    ends the process when it has scored the last one.

    Args:
        model: a compiled `keras.Model`.
        data: a function of a `tfdist.Shard` that returns a `tf.data.Dataset` of the shard's batches; a dataset, whose
            batches the workers divide; or arrays `(x, y)` or `(x, y, sample_weight)`.
        epochs: how many times `steps_per_epoch`; 1 when `max_steps` isn't given either.
        steps_per_epoch: steps in an epoch, of all workers together where they are asynchronous. By default as many as
            show the data once; the data then starts again with each epoch. When it is given, the data is taken as it
            is, and running out of it is an error.
        max_steps: the global step to end at exactly, earlier launches' steps included.
        steps_per_execution: steps a worker takes between two reports; by default up to 20 with parameter servers and
            10 otherwise, or 1 when a callback acts on batches.
        batch_size: examples in a worker's batch where the data is arrays, and in one of validation arrays; by default
            32.
        shuffle: whether training data that is arrays is shuffled, for each worker and each pass in an order of its own,
            which is the same in each run.
        share: what each worker sees: its own part of the data (`split`), all of it (`copy`), or what the cluster's data
            workers have ready next (`service`), which then run the whole of the pipeline.
        validation_data: like `data`, or a `tfdist.Validation`; scored after each epoch, each example once.
        callbacks: Keras callbacks, run on the chief: several, or one.
        checkpoints: where the training is saved, and goes on from.
        updates: when gradients are applied, on parameter servers; asynchronously by default.
        learning_rate: what becomes of the optimizer's learning rate; it stays as it is by default.
        wire: the type in which parameters and gradients cross the network: `float32`, `bfloat16` or `float16`.
        embeddings: which `Embedding` tables are moved row by row, on parameter servers; None for none.
        jit: whether XLA compiles the forward and backward pass; `"auto"` tries it before the training, and takes the
            quicker way.
        more: refused; Keras's `fit` takes the targets here.
        unknown: refused, with what to write instead of Keras's arguments that are not among these.

    Returns:
        Keras's `History`: `history.history["loss"]` has a value for each epoch.

    Raises:
        UsageError: an argument cannot mean anything.
        TrainingError: the data, the model or a checkpoint is at fault.
    """
    refuse_unknown(more, unknown)
    callbacks = as_callbacks(callbacks)
    check_counts(0, epochs=epochs, max_steps=max_steps)
    check_counts(1, steps_per_epoch=steps_per_epoch, steps_per_execution=steps_per_execution, batch_size=batch_size)
    check_choice((True, False), shuffle=shuffle)
    check_choice(get_args(Share), share=share)
    check_choice(get_args(WireType), wire=wire)
    check_choice((True, False, "auto"), jit=jit)
    check_kind(Updates, updates=updates)
    check_kind(LearningRate, learning_rate=learning_rate)
    check_kind(EmbeddingRule, embeddings=embeddings)
    check_kind(Checkpoints, checkpoints=checkpoints)
    speak()
    joined = join()
    function = _training_data(data, batch_size, shuffle=shuffle)
    validation = _validation(validation_data, batch_size)
    if joined.environment.task.traits.evaluates:
        if validation is None or checkpoints is None:
            raise UsageError("an evaluator needs validation_data and checkpoints", hint="pass both to tfdist.fit")
        run_evaluator(model, validation, checkpoints.saving().folder, joined.environment.run_dir)
        raise SystemExit(0)
    rules = Rules(updates or Updates(), learning_rate or LearningRate(), wire, embeddings, jit)
    repeats = steps_per_epoch is None
    if steps_per_epoch is None:
        steps_per_epoch = full_pass(joined, function, rules, share)
    if share == "service":
        function = DataService.of(joined.environment).whole_batches(function, repeat=repeats)
    elif repeats:
        function = repeated(function)
    assignment = TrainingConfig(
        function,
        steps_per_epoch,
        share=share,
        epochs=epochs,
        max_steps=max_steps,
        steps_per_execution=steps_per_execution,
        validation=validation,
        callbacks=callbacks,
        saving=checkpoints.saving() if checkpoints else None,
        rules=rules,
    )
    return train(joined, model, assignment)


def train(joined: ClusterContext, model: keras.Model, assignment: TrainingConfig) -> keras.callbacks.History:
    """Carries out an assignment with a model that was built under the strategy's scope.

    Raises:
        TrainingError: the data, the model or a checkpoint is at fault.
        ResultNotSaved: the model is trained, and its last checkpoint could not be written.
        Terminated: the process was told to end.
    """
    assignment = assignment.within_limits()
    _check_scope(joined)
    _check_callbacks(assignment)
    step = ModelStep(model)
    check_validation(joined, assignment.validation)
    spec = checked(assignment.data, shards_of(joined, assignment.share)[0]).element_spec
    _check_targets(model, spec)
    with Termination() as termination:
        with joined.strategy.scope():
            step.build(spec)
            if joined.placement:
                joined.placement.report(model)
            engine = select_engine(joined, step, spec, assignment.rules)
            start = resume(engine, step, assignment)
            first = start.step
        schedule = _schedule(assignment, engine, model, start)
        progress = Progress(
            joined.environment.run_dir, engine=engine, first=first, total=schedule.total, epochs=schedule.epochs
        )
        loop = TrainingLoop(engine, step, schedule, assignment, progress=progress, termination=termination)
        emit("state", state="training")
        if first >= schedule.total:
            log.info("nothing to train: step %d of %d is done already", first, schedule.total)
        try:
            with naming_misfits(model):
                history = loop.run(start)
        except Terminated:
            leave_together(
                joined, done=False
            )  # all have agreed to end; one that goes first would break the others' last sum
            raise
        progress.finish()
        loop.check_saved()
    return history


def full_pass(joined: ClusterContext, data: DatasetFunction, rules: Rules, share: Share) -> int:
    """Global steps that show the data once: once to all workers together, or once to each where they don't divide it.

    Raises:
        TrainingError: the data does not say how long it is, or is empty.
    """
    coordinated = joined.environment.traits.coordinated
    asynchronous = coordinated and not rules.updates.synchronous
    shards, workers = shards_of(joined, share), len(shards_of(joined, "split"))
    steps = steps_in(data, shards, synchronous=not asynchronous)
    if steps is None:
        raise TrainingError("the length of the training data is not known", hint=AUTO_EPOCH_HINT)
    if steps == 0:
        raise TrainingError(
            f"the training data has no full batch for each of {workers} workers",
            hint="use a smaller batch_size, fewer workers, or more data; "
            "and leave .batch() out of a recipe's dataset(), which returns single examples",
        )
    if asynchronous:
        return steps
    replicas = workers if coordinated else joined.strategy.num_replicas_in_sync
    return max(1, steps // (replicas if share == "service" else replicas // workers))


def shards_of(joined: ClusterContext, share: Share) -> list[Shard]:
    """What each worker sees of the data; a data service is asked for all of it."""
    if share == "service":
        return [Shard()]
    environment = joined.environment
    workers = sum(computes_gradients(environment.strategy, task.role) for task in environment.members)
    split = share == "split"
    return [Shard(n if split else 0, workers if split else 1, n) for n in range(workers)]


def check_validation(joined: ClusterContext, validation: Validation | None) -> None:
    """Looks at what is to be scored before the training begins.

    Raises:
        TrainingError: it has no end, is no dataset, or does not heed the shard.
    """
    if validation is None:
        return
    shard = shards_of(joined, "split")[0]
    if validation.steps is None:
        check_ends(validation.data, shard)
    else:
        checked(validation.data, shard)


@contextmanager
def naming_misfits(model: keras.Model) -> Iterator[None]:
    """Has an operation that fails of the data's values raise what is wrong with the data.

    Raises:
        TrainingError: an id outside of a table, a label that the model has no output for, strings, wrong shapes.
    """
    try:
        yield
    except tf.errors.OpError as error:
        told = found_in_step(model, error)
        if told is None:
            raise
        raise told from error


def _schedule(assignment: TrainingConfig, engine: Engine, model: keras.Model, start: Start) -> Schedule:
    size = assignment.steps_per_execution
    if size is None and model.steps_per_execution > 1:
        size = model.steps_per_execution
    if size is None and any(acts_on_batches(callback) for callback in assignment.callbacks):
        size = 1
    adapts = size is None
    if size is None:
        sharers = 1 if engine.synchronous else engine.workers
        most = max(1, min(engine.max_steps_per_execution, UNROLLED_OPERATIONS // engine.operations()))
        size = auto_steps_per_execution(assignment.steps_per_epoch, sharers, most)
    _check_alike(assignment, engine)
    size = int(engine.total(np.array([float(size * engine.is_chief)]))[0])
    return Schedule(assignment.steps_per_epoch, assignment.total(start.origin), size, adapts, start.origin)


def _check_alike(assignment: TrainingConfig, engine: Engine) -> None:
    """Tasks that were given different lengths would wait for each other for ever.

    Raises:
        TrainingError: this task was given something else than the chief.
    """
    validation, saving = assignment.validation, assignment.saving
    own = {
        "steps in an epoch": assignment.steps_per_epoch,
        "the last step": assignment.total(),
        "epochs from one validation to the next": validation.every_epochs if validation else 0,
        "steps from one checkpoint to the next": (saving.every_steps or 0) if saving else 0,
    }
    values = np.array(list(own.values()), np.float64)
    for (name, value), chiefs in zip(own.items(), engine.total(values * engine.is_chief), strict=True):
        if value != chiefs:
            raise TrainingError(
                f"{name}: {value} here, {chiefs:.0f} on the chief",
                hint="give tfdist.fit the same data and arguments on every task",
            )


def _check_scope(joined: ClusterContext) -> None:
    """TensorFlow does not allow one strategy within another.

    Raises:
        UsageError: this is called under the scope of a strategy that is not tfdist's.
    """
    alone = joined.environment.traits.current_scope  # its strategy is whatever it was found in
    if tf.distribute.has_strategy() and (alone or tf.distribute.get_strategy() is not joined.strategy):
        raise UsageError(
            f"tfdist trains under a strategy of its own, and this is the scope of a {_current_strategy()}",
            hint="make and compile the model under `with tfdist.scope():`, and leave the other strategy out",
        )


def _current_strategy() -> str:
    return type(tf.distribute.get_strategy()).__name__


def _check_callbacks(assignment: TrainingConfig) -> None:
    """Two that restore a training would each undo what the other has restored.

    Raises:
        UsageError: there are checkpoints, and Keras's `BackupAndRestore`.
    """
    backups = [each for each in assignment.callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    if assignment.saving and backups:
        raise UsageError(
            "the BackupAndRestore callback and tfdist's checkpoints would both restore the training",
            hint="leave BackupAndRestore out: a training with checkpoints goes on where it was",
        )


def _check_targets(model: keras.Model, spec: Any) -> None:
    """A loss of Keras's compares outputs with targets.

    Raises:
        TrainingError: there are none.
    """
    alone = not isinstance(spec, tuple) or len(spec) == 1
    if alone and has_compiled_loss(model) and type(model).compute_loss is keras.Model.compute_loss:
        raise TrainingError(
            "the data has inputs but no targets, which the loss needs",
            hint="yield (x, y), or compile the model without a loss and add its own with add_loss or compute_loss",
        )


def _training_data(data: Any, batch_size: int | None, *, shuffle: bool) -> DatasetFunction:
    function = as_dataset_function(data, batch_size, shuffle=shuffle)
    if batch_size is not None and not isinstance(function, ArrayBatches):
        raise UsageError(
            "batch_size is for arrays, and this data comes in batches of its own",
            hint=f"leave it out; dataset.batch({batch_size}) makes batches",
        )
    return function


def _validation(data: Any, batch_size: int | None) -> Validation | None:
    if data is None:
        return None
    wanted = data if isinstance(data, Validation) else Validation(data)
    return replace(wanted, data=as_dataset_function(wanted.data, batch_size))
