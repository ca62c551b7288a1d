"""The training loop: epochs and steps, callbacks, validation, checkpoints, and coming to an orderly stop.

Every task that has a loop runs the same one. What only the chief knows (callbacks' wishes, the clock) reaches the
others through the engine before any of them acts on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from tfdist_cli.errors import ResultNotSaved, TrainingError
from tfdist_cli.records import emit
from tfdist_cli.train.assignment import Assignment, Saving, Schedule
from tfdist_cli.train.checkpoint import TrainingState
from tfdist_cli.train.engine import Engine, Execution
from tfdist_cli.train.memory import CallbackStates, random_states
from tfdist_cli.train.metrics import MetricTotals
from tfdist_cli.train.progress import Progress
from tfdist_cli.train.resume import Position, Start, position, rates_of, take_back
from tfdist_cli.train.saver import Content, Saver
from tfdist_cli.train.step import ModelStep
from tfdist_cli.train.termination import Termination
from tfdist_cli.train.update import updating

log = logging.getLogger("tfdist")


class TrainingLoop:
    """One training from its first step here to its last.

    Args:
        engine: runs the steps.
        step: the model.
        schedule: how long.
        assignment: callbacks, validation and checkpoints.
        progress: reports.
        termination: requests to end early.
    """

    def __init__(
        self,
        engine: Engine,
        step: ModelStep,
        schedule: Schedule,
        assignment: Assignment,
        *,
        progress: Progress,
        termination: Termination,
    ) -> None:
        self._engine = engine
        self._model = step.model
        self._step = step
        self._schedule = schedule
        self._validation = assignment.validation
        self._saving = saving = assignment.saving
        callbacks = assignment.callbacks
        self._saver = Saver(saving.folder, step, saving.asynchronous) if saving and engine.is_chief else None
        self._progress = progress
        self._pause = _LoopPause(termination, saving if engine.is_chief else None)
        self._totals = MetricTotals(step)
        self._has_callbacks, self._each_batch, self._ends_on_nan = _chiefs_flags(engine, callbacks)
        # What is done at the end of a training may change the variables after the last step.
        self._ends_changed = self._has_callbacks or any(inner.use_ema for inner in updating(self._model.optimizer))
        self._done = self._ended = 0
        self._owes_save = False
        """Whether a checkpoint is due that waits for the end of an epoch: at its last step, all else comes first."""
        self._start = Start()
        self._take_back: Callable[[], None] | None = None
        self._callbacks = keras.callbacks.CallbackList(
            list(callbacks) if engine.is_chief else [],
            add_history=True,
            model=step.model,
            verbose=0,
            epochs=schedule.epochs,
            steps=schedule.steps_per_epoch,
        )

    def run(self, start: Start) -> keras.callbacks.History:
        """Trains from where it starts to the end of the schedule.

        Raises:
            TrainingError: a loss that is not a number, data that ends.
            Terminated: the process was told to end; a checkpoint holds what was done.
        """
        try:
            return self._run(start)
        except BaseException:
            if self._saver:
                self._saver.close()
            raise

    def _run(self, start: Start) -> keras.callbacks.History:
        self._start, self._done = start, start.step
        self._model.stop_training = False
        at = self._begin(start)
        logs: dict[str, float] = {}
        for epoch in range(min(at.ended, self._schedule.epoch(self._done)), self._schedule.epochs):
            if at.stopped or (self._done >= self._schedule.total and not self._within_epoch()):
                break
            logs = self._epoch(epoch, at)
            if self._stopped():
                break
            if self._owes_save and self._done < self._schedule.total:
                self._save()
        self._engine.settle(self._done)
        with self._engine.scope():
            self._model.optimizer.finalize_variable_values(self._model.trainable_weights)
        self._callbacks.on_train_end(logs)
        if self._has_callbacks:
            self._engine.share_variables()
        self._save(final=True, stopped=at.stopped or self._stopped())
        return self._model.history

    def _begin(self, start: Start) -> Position:
        """Tells callbacks of the beginning; those of a training that goes on get back what they knew."""
        rates = rates_of(self._engine, self._model)
        self._callbacks.on_train_begin()
        self._states = CallbackStates(self._callbacks.callbacks)
        at = position(self._engine, start, self._schedule, self._states.names, self._totals.size)
        if at.stopped:
            log.info("a callback has ended the training at step %d; more epochs, or other callbacks, go on", self._done)
        self._ended = at.ended
        self._progress.begin(at.ended)
        if found := start.found:
            self._take_back = partial(take_back, self._engine, found, self._model, self._states, rates)
            if not self._within_epoch():
                self._take_back()
        self._owes_save = self._at_epochs_end()  # it was saved before that end, which must not come a third time
        return at

    def _within_epoch(self) -> bool:
        """Whether steps have been done of an epoch whose end has not been dealt with."""
        return self._schedule.first(self._ended) < self._done

    def _at_epochs_end(self) -> bool:
        """Whether all steps have been done of an epoch whose end has not been dealt with."""
        return self._done >= min(self._schedule.first(self._ended + 1), self._schedule.total) and self._within_epoch()

    def check_saved(self) -> None:
        """Says so when the training is done and what it came to is not on the disk.

        Raises:
            ResultNotSaved: the last checkpoint could not be written.
        """
        if self._saver and self._saving and self._saver.unsaved:
            raise ResultNotSaved(
                f"the last checkpoint could not be written: {self._saver.unsaved}",
                hint=f"make room in {self._saving.folder.path}, or have it writable, and launch again: "
                "training goes on from the last good checkpoint",
            ) from self._saver.unsaved

    @property
    def done(self) -> int:
        """Global steps done."""
        return self._done

    def _epoch(self, epoch: int, at: Position) -> dict[str, float]:
        goes_on = self._done > self._schedule.first(epoch)
        self._callbacks.on_epoch_begin(epoch)
        if self._within_epoch() and self._take_back:
            self._take_back()  # of this beginning, too, they had heard before
        if self._has_callbacks:
            self._engine.share_variables()  # with what callbacks have changed since the last epoch, the rate perhaps
            self._agree_to_stop()
        self._totals.reset()
        if goes_on:
            self._totals.add(at.totals)
        self._progress.begin_epoch()
        target = min(self._schedule.first(epoch + 1), self._schedule.total)
        while self._done < target and not self._stopped():
            self._stretch(epoch, self._boundary(target))
        logs = self._totals.logs()
        self._progress.report("train", self._done, epoch + 1, logs, done=True)
        self._engine.settle(self._done)
        logs |= self._validate(epoch)
        self._callbacks.on_epoch_end(epoch, logs)
        self._ended = epoch + 1
        if self._has_callbacks:
            self._agree_to_stop()
        return logs

    def _boundary(self, target: int) -> int:
        every = self._saving.every_steps if self._saving else None
        return min(target, (self._done // every + 1) * every) if every else target

    def _stretch(self, epoch: int, boundary: int) -> None:
        """Trains up to `boundary` or to a pause, then saves what is to be saved."""
        epoch_first = self._schedule.first(epoch)
        executions = self._engine.run(
            boundary - self._done,
            first=self._done,
            size=self._schedule.steps_per_execution,
            adapts=self._schedule.adapts,
            pause=self._pause,
        )
        while True:
            one_by_one = self._each_batch and self._engine.one_by_one
            if one_by_one and self._done < boundary and not self._pause.agreed():
                self._callbacks.on_train_batch_begin(self._done - epoch_first)
                self._engine.share_settings()  # a callback of the chief's may have set them, or after the last batch
            execution = next(executions, None)
            if execution is None:
                break
            each_batch = self._each_batch and len(execution.losses)  # without losses it tells of dropped gradients
            if each_batch and not one_by_one:
                self._callbacks.on_train_batch_begin(execution.first - epoch_first)
            self._take(execution, epoch)
            if each_batch:
                last = execution.first + len(execution.losses) - 1
                self._callbacks.on_train_batch_end(last - epoch_first, self._totals.logs())
                self._agree_to_stop()
        if self._pause.agreed() and not self._stopped():
            terminate, save = self._engine.total(self._pause.wishes())
            self._pause.reset()
            if terminate:
                self._save(last=True)
                self._engine.total(np.zeros(1))  # nobody leaves while the chief is saving
                self._pause.termination.carry_out(self._done)
            if save:
                self._save_unless_epoch_ends()
        elif self._saving and self._saving.every_steps and self._done % self._saving.every_steps == 0:
            self._save_unless_epoch_ends()

    def _take(self, execution: Execution, epoch: int) -> None:
        bad = np.flatnonzero(~np.isfinite(execution.losses))
        if bad.size and not self._ends_on_nan:
            raise self._not_a_number(execution, int(bad[0]))
        self._totals.add(execution.metrics)
        self._progress.count(execution)
        self._done += len(execution.losses)
        self._pause.hear(execution.votes)
        if self._progress.due():
            self._progress.report("train", self._done, epoch + 1, self._totals.logs())

    def _not_a_number(self, execution: Execution, place: int) -> TrainingError:
        worker = " and ".join(execution.steps) if not self._engine.synchronous else "all workers"
        return TrainingError(
            f"the loss is {execution.losses[place]} at step {execution.first + place + 1} (taken by {worker})",
            hint="lower the learning rate, clip gradients (clipnorm), or look for such values in the data",
        )

    def _validate(self, epoch: int) -> dict[str, float]:
        validation = self._validation
        last = self._done >= self._schedule.total
        if validation is None or ((epoch + 1) % validation.every_epochs and not last):
            return {}
        emit("state", state="evaluating")
        self._callbacks.on_test_begin()
        scores = self._engine.evaluate(validation.data, steps=validation.steps).logs()
        self._callbacks.on_test_end(scores)
        self._progress.report(validation.name, self._done, epoch + 1, scores)
        emit("state", state="training")
        return {f"val_{name}": value for name, value in scores.items()}

    def _stopped(self) -> bool:
        return bool(self._model.stop_training)

    def _agree_to_stop(self) -> None:
        wish = float(self._stopped()) if self._engine.is_chief else 0.0
        self._model.stop_training = bool(self._engine.total(np.array([wish]))[0])
        if self._stopped():
            self._pause.agree()

    def _save_unless_epoch_ends(self) -> None:
        """Saves a checkpoint; at the last step of an epoch, when its end has been dealt with and recorded."""
        self._owes_save = self._at_epochs_end()
        if not self._owes_save:
            self._save()

    def _save(self, *, last: bool = False, final: bool = False, stopped: bool = False) -> None:
        """Saves a checkpoint.

        Args:
            last: whether the process ends after it.
            final: whether the training does.
            stopped: whether a callback has ended it.
        """
        if self._saving is None:
            return
        self._owes_save = False
        self._engine.settle(self._done)
        self._pause.saved()
        if self._saver is None:
            return
        callbacks, arrays = self._states.save()
        state = TrainingState(
            self._done,
            self._ended,
            final,
            self._schedule.total if stopped else 0,
            self._schedule.steps_per_epoch,
            self._schedule.origin,
            self._engine.sharers,
            self._start.taken(self._done, self._engine),
            self._totals.packed(),
            callbacks,
            random_states(),
        )
        with self._engine.scope():
            self._saver.save(Content(state, arrays, self._ends_changed), wait=last or final)


class _LoopPause:
    """`engine.Pause` for a loop: told to end from outside, or time for a checkpoint."""

    def __init__(self, termination: Termination, saving: Saving | None) -> None:
        self.termination = termination
        self._every = saving.every_seconds if saving else None
        self._last_save = time.monotonic()
        self._agreed = False

    def wanted(self) -> bool:
        return self.termination.requested or self._save_due()

    def agreed(self) -> bool:
        return self._agreed

    def agree(self) -> None:
        self._agreed = True

    def hear(self, votes: int) -> None:
        self._agreed = self._agreed or votes > 0

    def wishes(self) -> np.ndarray:
        return np.array([float(self.termination.requested), float(self._save_due())])

    def reset(self) -> None:
        self._agreed = False

    def saved(self) -> None:
        self._last_save = time.monotonic()

    def _save_due(self) -> bool:
        return self._every is not None and time.monotonic() - self._last_save >= self._every


def _chiefs_flags(engine: Engine, callbacks: Sequence[Any]) -> tuple[bool, bool, bool]:
    """Whether the chief has callbacks, ones that act on batches, and one that ends the training at a loss of NaN.

    A program may have given callbacks to its chief alone, and yet all tasks have to take part in what they need.
    """
    stops = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
    own = [bool(callbacks), any(acts_on_batches(callback) for callback in callbacks), stops]
    has, each_batch, ends_on_nan = engine.total(np.array(own, np.float64) * engine.is_chief) > 0
    return bool(has), bool(each_batch), bool(ends_on_nan)


def acts_on_batches(callback: Any) -> bool:
    """Whether a Keras callback has something to do at each batch."""
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return any(_acts(callback, getattr(callback, hook)) for hook in hooks)


def _acts(callback: Any, method: Any) -> bool:
    """Whether one hook does something; Keras's own savers have hooks that leave at once when they act on epochs."""
    if getattr(method, "_is_default", False):
        return False
    kind = next((kind for kind in _FREQUENCIES if isinstance(callback, kind)), None)
    inherited = kind and getattr(kind, method.__name__, None) is getattr(method, "__func__", None)
    return not (inherited and getattr(callback, _FREQUENCIES[kind]) == "epoch")


_FREQUENCIES: dict[Any, str] = {
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.BackupAndRestore: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
}
