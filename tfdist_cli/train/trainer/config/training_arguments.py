"""The arguments of a training, and the configuration that follows from them, the data and the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, get_args

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.spec.sections.updates import EmbeddingRule, Jit, LearningRate, Updates, WireType
from tfdist_cli.train.cluster.data_service.reader import DataService
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.data.length import is_endless
from tfdist_cli.train.data.python_data.dataset_function import PythonData
from tfdist_cli.train.data.python_data.read_ahead import OwnShard
from tfdist_cli.train.data.shard import DatasetFunction
from tfdist_cli.train.engine.base import Rules, Sharing
from tfdist_cli.train.trainer.arguments import as_callbacks, check_choice, check_counts, check_type
from tfdist_cli.train.trainer.config.checkpoints import Checkpoints
from tfdist_cli.train.trainer.config.data_length import (
    check_ends,
    known_steps_of_pass,
    number_of_workers,
    steps_of_one_pass,
    warn_of_short_epochs,
    worker_shards,
)
from tfdist_cli.train.trainer.config.training import OPEN_END, Counting, TrainingConfig, Verbose
from tfdist_cli.train.trainer.config.validation import Validation

DEFAULT_EMBEDDINGS = EmbeddingRule()


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
        builds_first: see `Rules`.
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
    builds_first: bool = False
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
            data = data.skipping() if self.updates and self.updates.aggregate else data.buffered()
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
        data, workers = source.one_pass(), number_of_workers(context)
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
        given = updates, learning_rate, self.wire, self.embeddings, self.jit, self.phases
        return Rules(*given, micro_batches=parts, builds_first=self.builds_first)

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
