"""When a training saves a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Decision:
    """What a training does before its next step.

    Args:
        save: whether it saves a checkpoint.
        terminate: whether the process then exits, as SIGTERM asks it to.
    """

    save: bool = False
    terminate: bool = False


class CheckpointPolicy:
    """Decides when a training saves a checkpoint.

    A checkpoint is saved every `every_steps` global steps, every `every_seconds` seconds, on SIGTERM, and at the end of
    the training. One that is due at the last step of an epoch is deferred until the end of that epoch is recorded, that
    is, until its metrics are written, and validation and callbacks have run: a training that resumes from it does not
    record that end again. SIGTERM does not wait for this.

    Every task has a policy. Steps are the same on all tasks; a task's clock and signals are its own. So the tasks sum
    their `requests` before any of them calls `after_steps`, and all decide the same.

    Args:
        enabled: whether the training has checkpoints. A training without them still terminates on SIGTERM.
        every_steps: global steps from one checkpoint to the next; None for none because of steps.
        steps_per_round: steps that make an update together, counted from the first one of an epoch. A checkpoint waits
            for the end of the round, so that it changes no update.
        every_seconds: seconds from one checkpoint to the next; None for none because of time. Only the chief has it.
        termination_requested: returns whether this process received SIGTERM.
        clock: returns seconds that never decrease.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        every_steps: int | None = None,
        steps_per_round: int = 1,
        every_seconds: float | None = None,
        termination_requested: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled = enabled
        self._every_steps = every_steps if enabled else None
        self._steps_per_round = steps_per_round
        self._begun_at = 0
        """The step from which the training was to go on to `last_step`."""
        self._every_seconds = every_seconds if enabled else None
        self._termination_requested = termination_requested
        self._clock = clock
        self._saved_at = clock()
        self._deferred = False

    def last_step(self, step: int, target: int, first: int = 0) -> int:
        """Returns the step to train to from `step`: `target`, or an earlier one at which a checkpoint is due.

        Args:
            step: global steps done.
            target: the step to train to without checkpoints.
            first: the step at which the epoch began.
        """
        self._begun_at, every = step, self._every_steps
        if not every:
            return target
        due = (step // every + 1) * every
        return min(target, due + (first - due) % self._steps_per_round)

    def wants_pause(self) -> bool:
        """Returns whether this task has a request, for which training has to pause at the same step on all tasks."""
        return self._termination_requested() or self._time_is_due()

    def wants_end(self) -> bool:
        """Returns whether this task was asked to terminate."""
        return self._termination_requested()

    def requests(self) -> np.ndarray:
        """Returns what this task asks for at a pause: terminate, save; 0 or 1 each, float64, shape (2,)."""
        return np.array([self._termination_requested(), self._time_is_due()], np.float64)

    def after_steps(self, step: int, *, epoch_complete: bool, requests: np.ndarray | None = None) -> Decision:
        """Decides after a training has reached `last_step`, or has paused before.

        Args:
            step: global steps done.
            epoch_complete: whether this is the last step of an epoch, whose end is not recorded yet.
            requests: at a pause, the sum of all tasks' `requests`.
        """
        if requests is None:
            every = self._every_steps
            terminate, save = False, bool(every and step // every > self._begun_at // every)
        else:
            terminate, save = (bool(count) for count in requests)
        if terminate:
            return Decision(save=self._enabled, terminate=True)
        if save:
            self._deferred = epoch_complete
        return Decision(save=self._enabled and save and not epoch_complete)

    def after_resume(self, *, epoch_complete: bool) -> None:
        """Defers a checkpoint when the training resumes from one that was saved before its epoch's end was recorded."""
        self._deferred = epoch_complete

    def after_epoch(self, *, training_complete: bool) -> Decision:
        """Decides after the end of an epoch is recorded.

        Args:
            training_complete: whether this is the last step of the training; its checkpoint follows.
        """
        return Decision(save=self._enabled and self._deferred and not training_complete)

    def after_training(self) -> Decision:
        """Decides after the last step and `on_train_end`."""
        return Decision(save=self._enabled)

    def saved(self) -> None:
        """Notes that a checkpoint is saved."""
        self._deferred = False
        self._saved_at = self._clock()

    def _time_is_due(self) -> bool:
        return self._every_seconds is not None and self._clock() - self._saved_at >= self._every_seconds
