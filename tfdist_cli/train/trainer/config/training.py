"""The complete configuration of a training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import keras

from tfdist_cli.train.data.python_data.read_ahead import reads_ahead
from tfdist_cli.train.data.shard import DatasetFunction, Shard
from tfdist_cli.train.engine.base import Rules, Sharing
from tfdist_cli.train.trainer.config.checkpoints import CheckpointConfig
from tfdist_cli.train.trainer.config.validation import Validation

Verbose = Literal["auto", 0, 1, 2]
"""Keras's values of `verbose`."""

OPEN_END = 10**10
"""The steps of an epoch that ends with the data, until its length is known: more than any epoch has."""

log = logging.getLogger("tfdist")


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


def steps_of_epochs(epochs: int, steps_per_epoch: int, steps_per_pass: int | None) -> int:
    """Returns the steps of some epochs: as in Keras, the last epoch of a pass over the data may be shorter."""
    if steps_per_pass is None:
        return epochs * steps_per_epoch
    passes, within = divmod(epochs, math.ceil(steps_per_pass / steps_per_epoch))
    return passes * steps_per_pass + within * steps_per_epoch
