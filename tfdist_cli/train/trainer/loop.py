"""The training loop: epochs and steps, callbacks, validation, checkpoints, and coming to an orderly stop.

Every task that has a loop runs the same one. What only the chief knows (callbacks' wishes, the clock) reaches the
others through the engine before any of them acts on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from tfdist_cli.errors import ResultNotSaved, TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.callback_state import CallbackStates, random_states
from tfdist_cli.train.checkpoint.policy import CheckpointPolicy
from tfdist_cli.train.checkpoint.store import TrainingState
from tfdist_cli.train.checkpoint.writer import CheckpointWriter, Content
from tfdist_cli.train.engine.base import Engine, Execution
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import updating
from tfdist_cli.train.tf_compat.keras_model import initial_epoch
from tfdist_cli.train.trainer.batch_callbacks import BatchGroup, acts_on_batches, acts_on_test_batches
from tfdist_cli.train.trainer.config import Schedule, TrainingConfig, Validation
from tfdist_cli.train.trainer.reporting import Progress
from tfdist_cli.train.trainer.resume import Position, Start, position, rates_of, take_back
from tfdist_cli.train.trainer.sigterm import Termination

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
        assignment: TrainingConfig,
        *,
        progress: Progress,
        termination: Termination,
    ) -> None:
        self._engine = engine
        self._model = step.model
        self._step = step
        self._schedule = schedule
        self._assignment = assignment
        self._validation = assignment.validation
        self._saving = saving = assignment.saving
        callbacks = assignment.callbacks
        self._saver = CheckpointWriter(saving.folder, step, saving.asynchronous) if saving and engine.is_chief else None
        self._progress = progress
        self._termination = termination
        self._policy = CheckpointPolicy(
            enabled=saving is not None,
            every_steps=saving.every_steps if saving else None,
            every_seconds=saving.every_seconds if saving and engine.is_chief else None,
            termination_requested=lambda: termination.requested,
        )
        self._pause = _LoopPause(self._policy)
        self._totals = MetricTotals(step)
        flags = _chiefs_flags(engine, callbacks)
        self._has_callbacks, self._each_batch, self._each_test_batch, self._ends_on_nan = flags
        # What is done at the end of a training may change the variables after the last step.
        self._ends_changed = self._has_callbacks or any(inner.use_ema for inner in updating(self._model.optimizer))
        self._done = self._ended = 0
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
        call = self._callbacks
        self._group = BatchGroup(call.on_train_batch_begin, call.on_train_batch_end, schedule.steps_per_execution)
        size = 1 if schedule.adapts else schedule.steps_per_execution
        self._test_group = BatchGroup(call.on_test_batch_begin, call.on_test_batch_end, size)

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
            if self._policy.after_epoch(training_complete=self._done >= self._schedule.total).save:
                self._save()
        self._engine.settle(self._done)
        with self._engine.scope():
            self._model.optimizer.finalize_variable_values(self._model.trainable_weights)
        self._callbacks.on_train_end(logs)
        if self._has_callbacks:
            self._engine.share_variables()
        if self._policy.after_training().save:
            self._save(final=True, stopped=at.stopped or self._stopped())
        return self._model.history

    def _begin(self, start: Start) -> Position:
        """Tells callbacks of the beginning; those of a training that goes on get back what they knew."""
        rates = rates_of(self._engine, self._model)
        self._callbacks.on_train_begin()
        self._states = CallbackStates(self._callbacks.callbacks)
        at = position(self._engine, start, self._schedule, self._states.names, self._totals.size)
        at = self._after_epochs_of_callbacks(at)
        data, share = self._assignment.data, self._assignment.share
        with self._engine.scope():
            self._engine.open(data, share=share, step=self._done, batches=start.batches)
        if at.stopped:
            log.info("a callback has ended the training at step %d; more epochs, or other callbacks, go on", self._done)
        self._ended = at.ended
        self._progress.begin(at.ended)
        if found := start.found:
            self._take_back = partial(take_back, self._engine, found, self._model, self._states, rates)
            if not self._within_epoch():
                self._take_back()
        self._policy.after_resume(epoch_complete=self._at_epochs_end())
        return at

    def _after_epochs_of_callbacks(self, at: Position) -> Position:
        """Leaves out the epochs that Keras's `BackupAndRestore` has found done, and restored the variables after.

        The data begins anew then, as in Keras.
        """
        own = initial_epoch(self._model) if self._engine.is_chief and not self._start.step else 0
        epochs = int(self._engine.total(np.array([float(own)]))[0])
        if not epochs:
            return at
        self._engine.share_variables()
        self._done = min(self._schedule.first(epochs), self._schedule.total)
        log.info("a callback has restored what was trained: going on after epoch %d", epochs)
        return replace(at, ended=epochs)

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
            self._stretch(epoch, self._policy.last_step(self._done, target))
        logs = self._totals.logs()
        self._progress.report("train", self._done, epoch + 1, logs, done=True)
        self._engine.settle(self._done)
        logs |= self._validate(epoch)
        self._callbacks.on_epoch_end(epoch, logs)
        self._ended = epoch + 1
        if self._has_callbacks:
            self._agree_to_stop()
        return logs

    def _stretch(self, epoch: int, boundary: int) -> None:
        """Trains up to `boundary` or to a pause, then saves what is to be saved."""
        epoch_first = self._schedule.first(epoch)
        one_by_one = self._each_batch and self._engine.one_by_one
        executions = self._executions(boundary, one_by_one=one_by_one)
        while True:
            goes_on = self._done < boundary and not self._pause.agreed()
            if one_by_one and goes_on and self._group.begin(self._done - epoch_first):
                self._engine.share_changes()  # made by a callback of the chief's, or after the last batch
            execution = next(executions, None)
            if execution is None:
                break
            each_batch = self._each_batch and len(execution.losses)  # without losses it tells of dropped gradients
            if each_batch and not one_by_one:
                self._group.begin(execution.first - epoch_first)
            self._take(execution, epoch)
            if each_batch:
                self._end_group(epoch, boundary)
        requests = None
        if self._pause.agreed() and not self._stopped():
            requests = self._engine.total(self._policy.requests())
            self._pause.reset()
        decision = self._policy.after_steps(self._done, epoch_complete=self._at_epochs_end(), requests=requests)
        if decision.save:
            self._save(last=decision.terminate)
        if decision.terminate:
            self._engine.total(np.zeros(1))  # all tasks wait until the chief has saved
            self._termination.carry_out(self._done)

    def _end_group(self, epoch: int, boundary: int) -> None:
        """Tells callbacks of the batches that are done, if as many are done as they are told of at once.

        Before a pause, in which a checkpoint may be saved, they are told of all.
        """
        last = self._done - 1 - self._schedule.first(epoch)
        if not (self._group.is_full(last) or self._done == boundary or self._pause.agreed()):
            return
        data_ended = self._done == self._schedule.first(epoch + 1)
        self._group.end(last, self._totals.logs(), data_ended=data_ended)
        self._agree_to_stop()

    def _executions(self, boundary: int, *, one_by_one: bool) -> Iterator[Execution]:
        """The executions up to `boundary` or to a pause.

        One by one, none is begun before callbacks have heard of the one before: they may assign what it trains with.
        """
        size, adapts = self._schedule.steps_per_execution, self._schedule.adapts
        while self._done < boundary and not self._pause.agreed():
            left = boundary - self._done
            steps = (size if size <= left else 1) if one_by_one else left
            yield from self._engine.run(steps, first=self._done, size=size, adapts=adapts, pause=self._pause)

    def _take(self, execution: Execution, epoch: int) -> None:
        bad = np.flatnonzero(~np.isfinite(execution.losses))
        if bad.size and not self._ends_on_nan:
            raise self._not_a_number(execution, int(bad[0]))
        self._totals.add(execution.metrics)
        self._progress.count(execution)
        self._done += len(execution.losses)
        self._pause.count(execution.votes)
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
        if self._has_callbacks:
            self._engine.share_changes()
        score = self._score_batches if self._each_test_batch else self._score
        scores = score(validation).logs()
        self._callbacks.on_test_end(scores)
        self._progress.report(validation.name, self._done, epoch + 1, scores)
        emit("state", state="training")
        return {f"val_{name}": value for name, value in scores.items()}

    def _score(self, validation: Validation) -> MetricTotals:
        return self._engine.evaluate(validation.data, steps=validation.steps)

    def _score_batches(self, validation: Validation) -> MetricTotals:
        """The same, batch by batch, so that callbacks are told of each; one of them may end it."""
        totals, group, done = MetricTotals(self._step), self._test_group, 0
        self._model.stop_evaluating = False
        for score in self._engine.test_steps(validation.data, steps=validation.steps):
            if group.begin(done):
                self._engine.share_changes()
            totals.add(score())
            done += 1
            if group.is_full(done - 1):
                group.end(done - 1, totals.logs())
                if self._agreed(self._model.stop_evaluating):
                    break
        group.end(done - 1, totals.logs(), data_ended=True)
        return totals

    def _stopped(self) -> bool:
        return bool(self._model.stop_training)

    def _agreed(self, wish: bool) -> bool:
        """What the chief wishes. All tasks have to call it."""
        return bool(self._engine.total(np.array([float(wish and self._engine.is_chief)]))[0])

    def _agree_to_stop(self) -> None:
        self._model.stop_training = self._agreed(self._stopped())
        if self._stopped():
            self._pause.agree()

    def _save(self, *, last: bool = False, final: bool = False, stopped: bool = False) -> None:
        """Saves a checkpoint.

        Args:
            last: whether the process ends after it.
            final: whether the training does.
            stopped: whether a callback has ended it.
        """
        self._engine.settle(self._done)
        self._policy.saved()
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
    """`engine.Pause` for a loop: agreed on when a task has voted for it, or a callback has stopped the training."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        self._policy = policy
        self._agreed = False

    def wanted(self) -> bool:
        return self._policy.wants_pause()

    def agreed(self) -> bool:
        return self._agreed

    def agree(self) -> None:
        self._agreed = True

    def count(self, votes: int) -> None:
        self._agreed = self._agreed or votes > 0

    def reset(self) -> None:
        self._agreed = False


def _chiefs_flags(engine: Engine, callbacks: Sequence[Any]) -> tuple[bool, bool, bool, bool]:
    """Whether the chief has callbacks; some for training batches; some for validation batches; one that ends at NaN.

    A program may have given callbacks to its chief alone, and yet all tasks have to take part in what they need.
    """
    stops = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
    each_batch, each_test_batch = (any(map(acts, callbacks)) for acts in (acts_on_batches, acts_on_test_batches))
    own = [bool(callbacks), each_batch, each_test_batch, stops]
    agreed = engine.total(np.array(own, np.float64) * engine.is_chief) > 0
    return bool(agreed[0]), bool(agreed[1]), bool(agreed[2]), bool(agreed[3])
