"""What a training is given: data, length, validation, callbacks, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import keras

from tfdist_cli.spec.sections.recipe import Share
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.writer import Asynchronous
from tfdist_cli.train.data.pipeline import DatasetFunction
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.trainer.arguments import check_counts

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Schedule:
    """How long to train.

    Args:
        steps_per_epoch: global steps in an epoch.
        total: the global step to end at.
        steps_per_execution: steps between two reports of a worker.
        adapts: whether they may be fewer where steps take long: nobody has asked for just this number.
        origin: the global step at which the first epoch would have begun had all been of this length; see `Start`.
    """

    steps_per_epoch: int
    total: int
    steps_per_execution: int
    adapts: bool = False
    origin: int = 0

    @property
    def epochs(self) -> int:
        """Epochs, the last one perhaps not whole."""
        return math.ceil((self.total - self.origin) / self.steps_per_epoch)

    def first(self, epoch: int) -> int:
        """The global step that an epoch, from 0, begins with; the end of the one before it."""
        return self.origin + epoch * self.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that the step after `step` belongs to."""
        return (step - self.origin) // self.steps_per_epoch


@dataclass(frozen=True)
class Validation:
    """What the model is scored on after epochs.

    Args:
        data: a shard → its batches; in a program, all that `tfdist.fit` takes for data.
        steps: batches to score; None for all of them.
        every_epochs: score after each of this many epochs, and at the end.
        name: the split's name in metrics.jsonl.
    """

    data: DatasetFunction
    steps: int | None = None
    every_epochs: int = 1
    name: str = "validation"

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, every_epochs=self.every_epochs)


@dataclass(frozen=True)
class Saving:
    """Where and when checkpoints are saved.

    Args:
        folder: where they go.
        every_steps: save each time this many global steps are done.
        every_seconds: save each time this many seconds have passed.
        asynchronous: whether training goes on meanwhile, see `CheckpointWriter`.
    """

    folder: CheckpointFolder
    every_steps: int | None = None
    every_seconds: float | None = None
    asynchronous: Asynchronous = "auto"


@dataclass(frozen=True)
class TrainingConfig:
    """All that a training is given.

    Args:
        data: a shard → its batches.
        steps_per_epoch: global steps in an epoch.
        share: what each worker sees of the data.
        epochs: epochs to train; None for as many as `max_steps` takes.
        max_steps: the global step to end at; None for the end of the epochs.
        steps_per_execution: steps between two reports of a worker; None lets the engine choose.
        validation: what to score after epochs.
        callbacks: the user's.
        saving: checkpoints.
        rules: how gradients become updates.
    """

    data: DatasetFunction
    steps_per_epoch: int
    share: Share = "split"
    epochs: int | None = None
    max_steps: int | None = None
    steps_per_execution: int | None = None
    validation: Validation | None = None
    callbacks: Sequence[keras.callbacks.Callback] = ()
    saving: Saving | None = None
    rules: Rules = field(default_factory=Rules)

    def within_limits(self) -> TrainingConfig:
        """The same, no longer than Keras's own limits for trials (`keras.config.set_max_epochs`) allow."""
        epochs, steps = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
        limited = self
        if epochs:
            own = self.epochs if self.epochs is not None or self.max_steps else 1
            limited = replace(limited, epochs=epochs if own is None else min(own, epochs))
        if steps:
            limited = replace(limited, steps_per_epoch=min(self.steps_per_epoch, steps))
            if self.validation:
                most = min(self.validation.steps or steps, steps)
                limited = replace(limited, validation=replace(self.validation, steps=most))
        if limited != self:
            log.warning("Keras's own limits shorten the training: max_epochs %s, max_steps_per_epoch %s", epochs, steps)
        return limited

    def total(self, origin: int = 0) -> int:
        """The global step the training ends at; `origin` is that of its `Schedule`."""
        by_epochs = None if self.epochs is None else origin + self.epochs * self.steps_per_epoch
        ends = [end for end in (by_epochs, self.max_steps) if end is not None]
        return min(ends) if ends else origin + self.steps_per_epoch
