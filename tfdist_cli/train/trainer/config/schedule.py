"""The length of a training, of its epochs and of its executions, in global steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tfdist_cli.train.trainer.config.training import OPEN_END, TrainingConfig, steps_of_epochs


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

    def resized(self, step: int, epoch: int, done: int, config: TrainingConfig) -> Schedule:
        """Returns the schedule with other epochs from a step on.

        Args:
            step: global steps done.
            epoch: the current epoch, counted from 0.
            done: how many steps of the current epoch are done, if each had as many batches as from now on.
            config: its `steps_per_epoch` are those of an epoch from now on.
        """
        origin = step - epoch * config.steps_per_epoch - done
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
