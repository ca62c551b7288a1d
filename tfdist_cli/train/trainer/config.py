"""The configuration of a training, and how it is built from the arguments of `fit` or from a recipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import keras

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.spec.strategies import computes_gradients
from tfdist_cli.train.checkpoint.bucket import open_checkpoints, scratch_folder
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.writer import Asynchronous
from tfdist_cli.train.cluster.data_service.reader import DataService
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.pipeline import DatasetFunction, Shard, is_endless, steps_in
from tfdist_cli.train.data.python_data import OwnShard, PythonData, reads_ahead
from tfdist_cli.train.engine.base import Rules, Sharing
from tfdist_cli.train.trainer.arguments import as_callbacks, check_choice, check_counts, check_type

DEFAULT_EMBEDDINGS = EmbeddingRule()
Verbose = Literal["auto", 0, 1, 2]
"""Keras's values of `verbose`."""

ONE_READER = ("service", "coordinator")
"""Ways to share data in which the workers' batches are those of one shard."""

OPEN_END = 10**10
"""The steps of an epoch that ends with the data, until its length is known: more than any epoch has."""

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Schedule:
    """The length of a training, of its epochs and of its executions.

    Args:
        steps_per_epoch: global steps in an epoch; `OPEN_END` if it ends with the data, and nobody knows where.
        total: the global step at which the training ends.
        steps_per_execution: steps that a worker takes between two reports.
        adapts: whether an execution may have fewer steps, where they take long or to start sooner: true if the user set
            no number.
        origin: the global step at which the first epoch would have begun if all epochs had this length; see
            `StartPoint`.
        steps_per_pass: the steps of a pass over the data, whose last epoch may be shorter; None if epochs continue
            across passes.
    """

    steps_per_epoch: int
    total: int
    steps_per_execution: int
    adapts: bool = False
    origin: int = 0
    steps_per_pass: int | None = None

    def resized(self, step: int, epoch: int, config: TrainingConfig) -> Schedule:
        """Returns the schedule with other epochs from a step on: as large a part of the current one is done as before.

        Args:
            step: global steps done.
            epoch: the current epoch, counted from 0.
            config: its `steps_per_epoch` are those of an epoch from now on.
        """
        share = round((step - self.first_step(epoch)) * config.steps_per_epoch / self.steps_per_epoch)
        origin = step - epoch * config.steps_per_epoch - share
        return replace(
            self, steps_per_epoch=config.steps_per_epoch, total=max(step, config.last_step(origin)), origin=origin
        )

    @property
    def is_open(self) -> bool:
        """Whether the length of an epoch is not known yet."""
        return self.steps_per_epoch == OPEN_END

    def with_pass(self, step: int, epoch: int, config: TrainingConfig) -> tuple[Schedule, TrainingConfig]:
        """Returns the schedule and the configuration after the first pass over the data has ended.

        Args:
            step: global steps done.
            epoch: the current epoch, counted from 0.
            config: the configuration so far.
        """
        begin = self.first_step(epoch) if self.is_open else self.origin
        config = config.with_pass(step - begin)
        origin = (
            begin - steps_of_epochs(epoch, config.steps_per_epoch, config.steps_per_pass) if self.is_open else begin
        )
        schedule = replace(
            self,
            steps_per_epoch=config.steps_per_epoch,
            steps_per_pass=config.steps_per_pass,
            total=max(step, config.last_step(origin)),
            origin=origin,
        )
        return schedule, config

    def begins_pass(self, step: int) -> bool:
        """Whether the step after some global steps is the first of another pass over data that has ended before."""
        own = self.steps_per_pass
        return own is not None and step > self.origin and (step - self.origin) % own == 0

    @property
    def epochs(self) -> int:
        """The number of epochs; the last one may be shorter."""
        return 0 if self.total <= self.origin else self.epoch(self.total - 1) + 1

    def first_step(self, epoch: int) -> int:
        """Returns the global step at which an epoch, counted from 0, begins."""
        return self.origin + steps_of_epochs(epoch, self.steps_per_epoch, self.steps_per_pass)

    def last_step(self, epoch: int) -> int:
        """Returns the global step at which an epoch, counted from 0, ends."""
        return min(self.first_step(epoch + 1), self.total)

    def epoch(self, step: int) -> int:
        """Returns the epoch, counted from 0, of the step that follows global step `step`."""
        if self.steps_per_pass is None:
            return (step - self.origin) // self.steps_per_epoch
        passes, within = divmod(step - self.origin, self.steps_per_pass)
        return passes * math.ceil(self.steps_per_pass / self.steps_per_epoch) + within // self.steps_per_epoch


def steps_of_epochs(epochs: int, steps_per_epoch: int, steps_per_pass: int | None) -> int:
    """Returns the steps of some epochs: as in Keras, the last epoch of a pass over the data may be shorter."""
    if steps_per_pass is None:
        return epochs * steps_per_epoch
    passes, within = divmod(epochs, math.ceil(steps_per_pass / steps_per_epoch))
    return passes * steps_per_pass + within * steps_per_epoch


@dataclass(frozen=True)
class Validation:
    """The data that the model is evaluated on after epochs.

    Args:
        data: a function of a shard that returns its batches; in a program, everything that `tfdist.fit` takes as data.
        steps: batches to evaluate; None for all of them.
        every_epochs: evaluate after every so many epochs, and at the end of the training.
        name: the split's name in metrics.jsonl.
        at_epochs: evaluate after these epochs only, counted from 1.
    """

    data: DatasetFunction
    steps: int | None = None
    every_epochs: int = 1
    name: str = "validation"
    at_epochs: Container[int] | None = None

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, every_epochs=self.every_epochs)

    def is_due(self, epoch: int, *, last: bool) -> bool:
        """Whether to evaluate after an epoch.

        Args:
            epoch: counted from 1.
            last: whether the training ends with it.
        """
        return last or epoch % self.every_epochs == 0 if self.at_epochs is None else epoch in self.at_epochs


@dataclass(frozen=True)
class ValidationArguments:
    """The arguments, under Keras's names, as `tfdist.fit` documents them.

    Raises:
        UsageError: a value is invalid.
    """

    validation_data: Any = None
    validation_split: Any = 0.0
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_counts(1, validation_steps=self.validation_steps, validation_batch_size=self.validation_batch_size)
        fraction = self.validation_split
        if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise UsageError(
                f"validation_split must be a number from 0 to less than 1, got {fraction!r}", code="invalid-argument"
            )
        listed = isinstance(self.validation_freq, (list, tuple, set))
        for epoch in self.validation_freq if listed else [self.validation_freq]:
            check_counts(1, validation_freq=epoch)
        if isinstance(self.validation_data, Validation) and (self.validation_steps or self.validation_freq != 1):
            raise UsageError(
                "validation_data is a tfdist.Validation, which has its own steps and epochs",
                code="validation-given-twice",
                hint="remove validation_steps and validation_freq, or pass the data alone",
            )

    def divide(self, data: Inputs, *, by_chief: bool = False) -> tuple[Inputs, Validation | None]:
        """Returns the data to train on, and what to validate on.

        Args:
            data: what `fit` was called with.
            by_chief: see `Inputs.dataset_function`.

        Raises:
            UsageError: the data cannot be split.
            TrainingError: it is not data that Keras takes.
        """
        given = self.validation_data
        if isinstance(given, Validation):
            own = _inputs(given.data)
            return data, replace(
                given, data=own.dataset_function(self._size_for(own), shuffle=False, by_chief=by_chief)
            )
        if given is not None:
            return data, self._validation(_inputs(given), by_chief)
        if self.validation_split:
            data, held_out = data.split(self.validation_split)
            return data, self._validation(held_out, by_chief)
        return data, None

    def _validation(self, data: Inputs, by_chief: bool) -> Validation:
        steps = self.validation_steps
        function = data.dataset_function(self._size_for(data), batches=steps, shuffle=False, by_chief=by_chief)
        return Validation(function, steps, at_epochs=self._epochs())

    def _size_for(self, data: Inputs) -> int | None:
        return self.validation_batch_size or self.batch_size if data.arrays else None

    def _epochs(self) -> Container[int]:
        return _Every(self.validation_freq) if isinstance(self.validation_freq, int) else self.validation_freq


@dataclass(frozen=True)
class _Every:
    """The multiples of a number."""

    number: int

    def __contains__(self, epoch: object) -> bool:
        return isinstance(epoch, int) and epoch % self.number == 0


def _inputs(data: Any) -> Inputs:
    return Inputs.of(tuple(data) if isinstance(data, list) else data, name="validation_data")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when a training saves checkpoints.

    Args:
        folder: the folder of the checkpoints.
        every_steps: save a checkpoint every so many global steps.
        every_seconds: save a checkpoint every so many seconds.
        asynchronous: whether training continues while a checkpoint is written; see `CheckpointWriter`.
        full_every: each so many-th checkpoint is full; see `CheckpointWriter`.
        push_tables: where the rows of dynamic tables are pushed after each checkpoint; None for nowhere.
    """

    folder: CheckpointFolder
    every_steps: int | None = None
    every_seconds: float | None = None
    asynchronous: Asynchronous = "auto"
    full_every: int = 1
    push_tables: Location | None = None


@dataclass(frozen=True)
class Checkpoints:
    """Where and when `fit` saves checkpoints. Training resumes from the newest checkpoint in the folder.

    Args:
        dir: the folder of the checkpoints, on this machine or in a storage service: `s3://bucket/run`.
        every_steps: save a checkpoint every so many global steps.
        every_seconds: save a checkpoint every so many seconds.
        keep: how many of the newest checkpoints to keep.
        asynchronous: whether training continues while a checkpoint is written. `auto`: if no task needs more than 1 GiB
            of memory for a second copy of its variables.
        full_every: each so many-th checkpoint is full. The others write only the rows of `DynamicEmbedding` tables that
            have changed since the checkpoint before, and all other variables. 1: all are full.
        push_tables: a folder, on this machine or in a storage service, to which the rows of `DynamicEmbedding` tables
            are pushed after each checkpoint, for servers that follow the training with `tfdist.TableReader`.
    """

    dir: str | Path
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    asynchronous: Asynchronous = "auto"
    full_every: int = 1
    push_tables: str | Path | None = None

    def __post_init__(self) -> None:
        check_counts(1, every_steps=self.every_steps, keep=self.keep, full_every=self.full_every)
        checked_location(self.dir)
        if self.push_tables is not None:
            checked_location(self.push_tables)

    def config(self, run_dir: Path | None = None, *, reads: bool = False) -> CheckpointConfig:
        """Returns the configuration of one training's checkpoints.

        Args:
            run_dir: the run's directory, where checkpoints are until they are uploaded.
            reads: whether this process only reads them.

        Raises:
            UsageError: the library for the storage service is not installed.
        """
        at = checked_location(self.dir)
        scratch = scratch_folder(at, run_dir) if isinstance(at, Url) and not reads else None
        folder = open_checkpoints(at, self.keep, scratch)
        push = None if self.push_tables is None else checked_location(self.push_tables)
        return CheckpointConfig(folder, self.every_steps, self.every_seconds, self.asynchronous, self.full_every, push)


@dataclass(frozen=True)
class Counting:
    """The data whose length has to be counted before the training.

    Args:
        data: a function of a shard that returns the elements to count.
        shards: the shards.
        configured: the configuration of the training, from the elements of each shard.
    """

    data: DatasetFunction
    shards: Sequence[Shard]
    configured: Callable[[Sequence[int]], TrainingConfig]


@dataclass(frozen=True)
class TrainingConfig:
    """The complete configuration of a training.

    Args:
        data: a function of a shard that returns its batches.
        steps_per_epoch: global steps in an epoch; `OPEN_END` if they are not known yet.
        share: what each worker sees of the data.
        epochs: epochs to train; None for as many as `max_steps` takes.
        max_steps: the global step at which the training ends; None for the end of the last epoch.
        steps_per_execution: steps that a worker takes between two reports; None lets the engine choose.
        validation: the data to evaluate after epochs.
        callbacks: the user's callbacks.
        checkpoints: where and when checkpoints are saved; None for no checkpoints.
        rules: how gradients become updates.
        steps_of_pass: the steps of one pass over the data by a number of workers; None if the user gave the steps of an
            epoch.
        steps_per_pass: the steps of one pass over data that starts again, if the user gave the steps of an epoch; see
            `Schedule`.
        initial_epoch: the epoch, counted from 0, that a training without a checkpoint starts with.
        verbose: what callbacks read as `params["verbose"]`.
        evaluator_stops: whether the evaluator may stop the training.
        counting: the data to count, if the steps of an epoch follow from its length.
        lengths: the elements of each shard, if they were counted.
        divided: one pass over the data, if each task divides its own copy of it.
    """

    data: DatasetFunction
    steps_per_epoch: int
    share: Sharing = "split"
    epochs: int | None = None
    max_steps: int | None = None
    steps_per_execution: int | None = None
    validation: Validation | None = None
    callbacks: Sequence[keras.callbacks.Callback] = ()
    checkpoints: CheckpointConfig | None = None
    rules: Rules = field(default_factory=Rules)
    steps_of_pass: Callable[[int | None], int] | None = None
    steps_per_pass: int | None = None
    initial_epoch: int = 0
    verbose: Verbose = "auto"
    evaluator_stops: bool = False
    counting: Counting | None = None
    lengths: Sequence[int] = ()
    divided: DatasetFunction | None = None

    @property
    def finds_end(self) -> bool:
        """Whether the training finds out where a pass over the data ends."""
        return reads_ahead(self.data) and self.steps_per_pass is None

    def with_pass(self, steps: int) -> TrainingConfig:
        """Returns this configuration when the steps of a pass over the data are known."""
        steps_per_epoch = steps if self.steps_per_epoch == OPEN_END else self.steps_per_epoch
        return replace(self, steps_per_epoch=steps_per_epoch, steps_per_pass=steps)

    def within_keras_limits(self) -> TrainingConfig:
        """Returns this configuration, shortened to Keras's own limits for trials (`keras.config.set_max_epochs`)."""
        max_epochs, max_steps = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
        limited = self
        if max_epochs:
            epochs = self.epochs if self.epochs is not None or self.max_steps else 1
            limited = replace(limited, epochs=max_epochs if epochs is None else min(epochs, max_epochs))
        if max_steps:
            limited = replace(limited, steps_per_epoch=min(self.steps_per_epoch, max_steps))
            if self.validation:
                steps = min(self.validation.steps or max_steps, max_steps)
                limited = replace(limited, validation=replace(self.validation, steps=steps))
        if limited != self:
            log.warning(
                "Keras's limits shorten the training: max_epochs %s, max_steps_per_epoch %s", max_epochs, max_steps
            )
        return limited

    def last_step(self, origin: int = 0) -> int:
        """Returns the global step at which the training ends; `origin` is that of its `Schedule`."""
        epochs = 1 if self.epochs is None and self.max_steps is None else self.epochs
        by_epochs = None
        if epochs is not None:
            by_epochs = origin + steps_of_epochs(epochs, self.steps_per_epoch, self.steps_per_pass)
        return min(end for end in (by_epochs, self.max_steps) if end is not None)


@dataclass(frozen=True)
class _Length:
    """What is known of the length of an epoch before the training.

    Args:
        steps_per_epoch: global steps in an epoch; `OPEN_END` if they are not known.
        repeat: whether the data starts again when it ends.
        steps_per_pass: see `TrainingConfig`.
        steps_of_pass: see `TrainingConfig`.
        found: the data, if it is read ahead of the steps to find its end.
        counting: what to count, if the steps follow from it.
    """

    steps_per_epoch: int
    repeat: bool
    steps_per_pass: int | None = None
    steps_of_pass: Callable[[int | None], int] | None = None
    found: DatasetFunction | None = None
    counting: Counting | None = None


class DataSource(Protocol):
    """The training data as the user gave it. Each function that it returns maps a shard to the shard's batches.

    Attributes:
        has_batches: whether the user's data comes in batches, which are trained on as they are.
    """

    has_batches: bool

    def elements(self) -> DatasetFunction:
        """Returns one pass over the data as the user gave it: batches or examples."""

    def with_lengths(self, lengths: Mapping[tuple[int, int], int]) -> DataSource:
        """Returns the data with the length of shards, by their index and count."""

    def one_pass(self) -> DatasetFunction:
        """Returns the batches of one pass over the data."""

    def batches(self, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on.

        Args:
            repeat: whether the data starts again when it ends.
        """

    def served_batches(self, service: DataService, *, repeat: bool) -> DatasetFunction:
        """Returns the batches to train on, prepared by the cluster's data workers."""


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The arguments of a training, checked. `tfdist.fit` documents them; a recipe has a key for each.

    Args:
        repeat: whether the data starts again when it ends; by default if its length is known. Then each pass begins
            with an epoch, as in Keras.
        phases: whether the time of each phase of a step is measured.
        evaluator_stops: whether the evaluator may stop the training, see `CheckpointScores`.

    Raises:
        UsageError: a value is invalid.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    steps_per_execution: int | None = None
    share: Share = "split"
    repeat: bool | None = None
    callbacks: Any = None
    checkpoints: Checkpoints | None = None
    updates: Updates | None = None
    learning_rate: LearningRate | None = None
    wire: WireType = "float32"
    embeddings: EmbeddingRule | None = DEFAULT_EMBEDDINGS
    jit: Jit = False
    phases: bool = False
    micro_batches: int = 1
    initial_epoch: int = 0
    verbose: Verbose = "auto"
    evaluator_stops: bool = False

    def __post_init__(self) -> None:
        check_counts(1, micro_batches=self.micro_batches)
        check_counts(0, epochs=self.epochs, max_steps=self.max_steps, initial_epoch=self.initial_epoch)
        check_counts(1, steps_per_epoch=self.steps_per_epoch, steps_per_execution=self.steps_per_execution)
        check_choice(get_args(Share), share=self.share)
        check_choice(get_args(WireType), wire=self.wire)
        check_choice((True, False, "auto"), jit=self.jit)
        check_choice(get_args(Verbose), verbose=self.verbose)
        check_type(Updates, updates=self.updates)
        check_type(LearningRate, learning_rate=self.learning_rate)
        check_type(EmbeddingRule, embeddings=self.embeddings)
        check_type(Checkpoints, checkpoints=self.checkpoints)
        as_callbacks(self.callbacks)
        if self.updates and self.updates.batch == "proportional" and self.share != "split":
            raise UsageError(
                f"updates.batch: proportional divides the data among the workers, and share is {self.share}",
                code="batch-needs-split",
                hint="use share: split, or remove updates.batch",
            )

    def configure(self, context: ClusterContext, source: DataSource, validation: Validation | None) -> TrainingConfig:
        """Returns the configuration of this training on a cluster.

        Args:
            context: this process in its cluster.
            source: the training data.
            validation: the data to evaluate after epochs.

        Raises:
            UsageError: the data is to come from data workers, and the cluster has none.
            TrainingError: the length of an epoch is not given, and the data never ends.
        """
        rules = self._rules()
        checkpoints = None
        if self.checkpoints:
            environment = context.environment
            checkpoints = self.checkpoints.config(environment.run_dir, reads=not environment.is_chief)
        share = self.share_of(source.one_pass(), coordinated=context.environment.traits.has_ps)
        length = self._length(context, source, validation, share)
        if length.found is not None:
            data = length.found
        elif self.share == "service":
            service = DataService.of(context.environment, context.data_workers)
            data = source.served_batches(service, repeat=length.repeat)
        else:
            data = source.batches(repeat=length.repeat)
        if share == "coordinator" and isinstance(data, PythonData):
            data = data.buffered()
        return TrainingConfig(
            data,
            length.steps_per_epoch,
            share=share,
            epochs=self.epochs,
            max_steps=self.max_steps,
            steps_per_execution=self.steps_per_execution,
            validation=validation,
            callbacks=as_callbacks(self.callbacks),
            checkpoints=checkpoints,
            rules=rules,
            steps_of_pass=length.steps_of_pass,
            steps_per_pass=length.steps_per_pass,
            initial_epoch=self.initial_epoch,
            verbose=self.verbose,
            evaluator_stops=self.evaluator_stops,
            counting=length.counting,
            divided=source.one_pass() if share == "split" else None,
        )

    def _length(
        self, context: ClusterContext, source: DataSource, validation: Validation | None, share: Sharing
    ) -> _Length:
        """Returns what is known of the length of an epoch before the training.

        Raises:
            TrainingError: it is not given, and the data never ends.
        """
        rules, one_pass, shard = self._rules(), source.one_pass(), worker_shards(context, share)[0]
        repeat = self.steps_per_epoch is None if self.repeat is None else self.repeat
        given = self.steps_per_epoch
        if given is not None and self.repeat is not None:
            return _Length(given, repeat=repeat)
        steps = known_steps_of_pass(context, one_pass, rules, share)
        if given is not None:
            warn_of_short_epochs(given, steps)
            ends = steps is None and not is_endless(one_pass, shard)
            found = self._finding_its_end(context, source, share, repeat=None) if ends else None
            return _Length(given, repeat=steps is not None, steps_per_pass=steps, found=found)
        if steps is not None:
            return _Length(
                steps, repeat=repeat, steps_of_pass=partial(steps_of_one_pass, context, one_pass, rules, share)
            )
        check_ends(one_pass, shard)
        found = self._finding_its_end(context, source, share, repeat=self.repeat)
        counting = None if found else self._counting(context, source, validation, share)
        return _Length(OPEN_END, repeat=repeat, found=found, counting=counting)

    def _counting(
        self, context: ClusterContext, source: DataSource, validation: Validation | None, share: Sharing
    ) -> Counting:
        shards = list({(shard.index, shard.count): shard for shard in worker_shards(context, share)}.values())

        def configured(lengths: Sequence[int]) -> TrainingConfig:
            named = {(shard.index, shard.count): length for shard, length in zip(shards, lengths, strict=True)}
            config = self.configure(context, source.with_lengths(named), validation)
            return replace(config, lengths=tuple(lengths))

        return Counting(source.elements(), shards, configured)

    def _finding_its_end(
        self, context: ClusterContext, source: DataSource, share: Sharing, *, repeat: bool | None
    ) -> DatasetFunction | None:
        """Returns data of unknown length that is read ahead of the steps; None if no process can do so.

        Args:
            context: this process in its cluster.
            source: the data.
            share: what each worker sees.
            repeat: whether it starts again when it ends; None if it can.
        """
        data, workers = source.one_pass(), _number_of_workers(context)
        python = isinstance(data, PythonData)
        repeat = repeat is not False and (not isinstance(data, PythonData) or data.source.repeats)
        if isinstance(data, PythonData) and share != "copy":  # its batches are numbered over all workers
            return replace(data.buffered(), repeat=repeat)
        if context.environment.traits.has_ps or share == "service" or not (python or source.has_batches):
            return None
        divided = self.updates is not None and self.updates.batch == "proportional"  # each worker reads all batches
        return OwnShard(data, 1 if divided else workers, repeat, by_pass=not divided)

    def _rules(self) -> Rules:
        updates, learning_rate = self.updates or Updates(), self.learning_rate or LearningRate()
        parts = self.micro_batches
        return Rules(updates, learning_rate, self.wire, self.embeddings, self.jit, self.phases, micro_batches=parts)

    def share_of(self, data: DatasetFunction, *, coordinated: bool) -> Sharing:
        """Returns what each worker sees of some data.

        Raises:
            UsageError: only the chief can read it, and the workers have to.
        """
        if not isinstance(data, PythonData) or not coordinated:
            return self.share
        if self.share != "split" or (self.updates and self.updates.batch == "proportional"):
            raise UsageError(
                "only the chief can read a generator, a PyDataset, a DataLoader or a dataset that calls Python code, "
                "and each worker would have to",
                code="python-data-on-workers",
                hint="remove share and updates.batch, or pass a function of a tfdist.Shard that returns a dataset",
            )
        return "coordinator"


def check_ends(data: DatasetFunction, shard: Shard) -> None:
    """Checks that data without a known length ends.

    Raises:
        TrainingError: it repeats without end.
    """
    if is_endless(data, shard):
        raise TrainingError(
            "the training data never ends, so nothing tells how long an epoch is",
            code="endless-epoch",
            hint="give steps_per_epoch, or remove .repeat()",
        )


def warn_of_short_epochs(steps_per_epoch: int, steps_per_pass: int | None) -> None:
    """Logs that the data ends within an epoch."""
    if steps_per_pass and steps_per_pass % steps_per_epoch:
        log.warning(
            "the data ends after %d steps, within an epoch of %d: that epoch ends early, and the data starts again "
            "with the next one; .repeat() on a dataset continues across its end",
            steps_per_pass,
            steps_per_epoch,
        )


def steps_of_one_pass(
    context: ClusterContext, data: DatasetFunction, rules: Rules, share: Sharing, workers: int | None = None
) -> int:
    """Returns the global steps of one pass over the data: by all workers together, or by each if each sees all of it.

    Args:
        context: this process in its cluster.
        data: one pass over the data.
        rules: how gradients become updates.
        share: what each worker sees.
        workers: how many workers there are; by default those of now.

    Raises:
        TrainingError: the data has no known length, or is empty.
    """
    steps = known_steps_of_pass(context, data, rules, share, workers)
    if steps is None:
        raise TrainingError(
            f"the training data has no known length for {workers or _number_of_workers(context)} workers, which "
            "steps_per_epoch follows from",
            code="unknown-data-length",
            hint="give steps_per_epoch",
        )
    return steps


def known_steps_of_pass(
    context: ClusterContext, data: DatasetFunction, rules: Rules, share: Sharing, workers: int | None = None
) -> int | None:
    """Returns what `steps_of_one_pass` does; None if the data has no known length.

    Raises:
        TrainingError: the data is empty.
    """
    coordinated = context.environment.traits.has_ps
    asynchronous = coordinated and not rules.updates.synchronous
    workers = workers or _number_of_workers(context)
    shards = worker_shards(context, share, workers)
    steps = steps_in(data, shards, synchronous=not asynchronous)
    if steps is None:
        return None
    if steps == 0:
        raise TrainingError(
            f"the training data has no full batch for each of {workers} workers",
            code="no-full-batch",
            hint="use a smaller batch_size, fewer workers, or more data; "
            "and leave .batch() out of a recipe's dataset(), which returns single examples",
        )
    if asynchronous:
        return steps
    replicas = workers if coordinated else context.replicas
    return max(1, steps // (replicas if share in ONE_READER else replicas // workers))


def batches_per_step(context: ClusterContext, updates: Updates | None) -> int:
    """Returns how many batches all workers together train on in a global step."""
    if not context.environment.traits.has_ps:
        return context.replicas
    return _number_of_workers(context) if updates and updates.synchronous else 1


def worker_shards(context: ClusterContext, share: Sharing, workers: int | None = None) -> list[Shard]:
    """Returns each worker's shard of the data; a single shard with all of it if data workers prepare it."""
    if share in ONE_READER:
        return [Shard()]
    workers = workers or _number_of_workers(context)
    split = share == "split"
    return [Shard(n if split else 0, workers if split else 1, n) for n in range(workers)]


def _number_of_workers(context: ClusterContext) -> int:
    environment = context.environment
    if context.joins:
        return len(context.joins.membership.members)
    if environment.traits.staged:
        return 1  # the chief reads the data
    return sum(computes_gradients(environment.strategy, task.role) for task in environment.members)
