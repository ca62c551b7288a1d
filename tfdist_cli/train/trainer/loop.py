"""The training loop: epochs and steps, callbacks, validation, checkpoints, and stopping early.

Every task that has a loop runs the same one. What only the chief knows, such as callbacks' requests and the clock, is
sent to the other tasks through the engine before any task acts on it.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import keras
import numpy as np

from tfdist_cli.errors import ResultNotSaved, TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.callback_state import CallbackStates, random_states
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.policy import CheckpointPolicy
from tfdist_cli.train.checkpoint.scores import stop_reason
from tfdist_cli.train.checkpoint.tables.push import TablePush
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.data.python_data.dataset_function import advance
from tfdist_cli.train.data.python_data.read_ahead import ReadAhead
from tfdist_cli.train.engine.base import Engine, Execution, WorkersLost
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep, last_build_spec
from tfdist_cli.train.optimizers.apply import leaf_optimizers
from tfdist_cli.train.tf_compat.keras_model import initial_epoch, write_train_graph
from tfdist_cli.train.trainer.batch_callbacks import BatchGroup, CallbackNeeds, chief_requests
from tfdist_cli.train.trainer.config.data_length import warn_of_short_epochs
from tfdist_cli.train.trainer.config.schedule import Schedule
from tfdist_cli.train.trainer.config.training import OPEN_END, TrainingConfig
from tfdist_cli.train.trainer.evaluate import Evaluation, write, written, written_for_callbacks
from tfdist_cli.train.trainer.reporting import ProgressReporter
from tfdist_cli.train.trainer.resume import (
    EpochPosition,
    RestoredValues,
    StartPoint,
    batches_per_step,
    epoch_position,
    restore_process_state,
    steps_of_now,
)
from tfdist_cli.train.trainer.sigterm import SigtermRequest, Terminated

log = logging.getLogger("tfdist")

_BLOCK = 4
"""Executions, for each worker, that are run at once while the end of the data is looked for."""


class TrainingLoop:
    """The loop of one training, from the first step of this launch to the last.

    Args:
        engine: runs the steps.
        step: the model.
        schedule: the length of the training.
        config: callbacks, validation and checkpoints.
        reporter: reports progress.
        sigterm: whether the process is asked to terminate.
    """

    def __init__(
        self,
        engine: Engine,
        step: ModelStep,
        schedule: Schedule,
        config: TrainingConfig,
        *,
        reporter: ProgressReporter,
        sigterm: SigtermRequest,
    ) -> None:
        self._engine = engine
        self._model = step.model
        self._step = step
        self._schedule = schedule
        self._config = config
        self._reporter = reporter
        self._sharers = engine.sharers  # those that the schedule follows from
        self._policy = _checkpoint_policy(config, engine, sigterm)
        self._pause = _Pause(self._policy)
        self._writer: CheckpointWriter | None = None
        if config.checkpoints and engine.is_chief:
            saved = config.checkpoints
            push = None if saved.push_tables is None else TablePush(saved.push_tables, step)
            self._writer = CheckpointWriter(saved.folder, step, saved.asynchronous, saved.full_every, push)
        self._totals = MetricTotals(step)
        self._needs = CallbackNeeds.of_chief(engine, config.callbacks)
        # The end of a training may change the variables after the last step.
        self._end_changes = self._needs.callbacks or any(
            inner.use_ema for inner in leaf_optimizers(self._model.optimizer)
        )
        self._finds_end = config.finds_end
        self._done = self._recorded = self._batches = self._epoch_batches = 0
        """Global steps done, epochs whose end is recorded, and batches of the data that were trained on: in all epochs,
        and in the one that is not complete."""
        self._start = StartPoint()
        self._restores: list[Callable[[], None]] = []
        """What restores the state that a checkpoint within an epoch has, after this epoch's `on_epoch_begin`."""
        self._callbacks = keras.callbacks.CallbackList(
            list(config.callbacks) if engine.is_chief else [],
            add_history=True,
            model=step.model,
            verbose=config.verbose,
            epochs=schedule.epochs,
            steps=None if schedule.is_open else schedule.steps_per_epoch,  # Keras shows "Unknown"
        )
        self._interrupted = False
        """Whether SIGTERM has ended an evaluation or a prediction of a callback, and with it the hook."""
        call = self._callbacks
        begin, end = (partial(self._call, hook) for hook in (call.on_train_batch_begin, call.on_train_batch_end))
        self._group = BatchGroup(begin, end, schedule.steps_per_execution)
        self._group_size = 1 if schedule.adapts else schedule.steps_per_execution
        self._evaluation = Evaluation(engine, step, call, self._needs, self._group_size)

    @property
    def done(self) -> int:
        """Global steps done."""
        return self._done

    def run(self, start: StartPoint) -> keras.callbacks.History:
        """Trains from a start point to the end of the schedule.

        Raises:
            TrainingError: a loss is not finite, or the data ends too early.
            Terminated: the process received SIGTERM; the state is saved if the training has checkpoints.
        """
        try:
            return self._run(start)
        except BaseException:
            if self._writer:
                self._writer.close()
            raise

    def check_saved(self) -> None:
        """Checks that the last checkpoint was written.

        Raises:
            ResultNotSaved: it could not be written.
        """
        if self._writer and self._config.checkpoints and self._writer.unsaved:
            raise ResultNotSaved(
                f"the last checkpoint could not be written: {self._writer.unsaved}",
                code="checkpoint-not-written",
                hint=self._config.checkpoints.folder.unsaved_hint(),
            ) from self._writer.unsaved
        if self._writer and self._config.checkpoints and self._writer.not_pushed:
            raise ResultNotSaved(
                f"the last rows were not pushed to {self._config.checkpoints.push_tables}: {self._writer.not_pushed}",
                code="tables-not-pushed",
                hint="make the folder writable, and launch again with more steps: the next push has these rows, too",
            ) from self._writer.not_pushed

    def _run(self, start: StartPoint) -> keras.callbacks.History:
        self._start, self._done = start, start.step
        self._model.stop_training = False
        position = self._begin(start)
        self._batches = start.batches  # after restored epochs, too: their data is not skipped
        logs: dict[str, float] = {}
        for epoch in itertools.count(min(position.recorded, self._schedule.epoch(self._done))):
            if epoch >= self._schedule.epochs or position.stopped:
                break
            if (self._is_complete() or not self._has_data(epoch)) and not self._is_within_epoch():
                break
            logs = self._epoch(epoch, position)
            if self._is_stopped():
                break
            if self._policy.after_epoch(training_complete=self._is_complete()).save:
                self._save()
                self._ask_evaluator()
                if self._is_stopped():
                    break
        self._engine.settle(self._done)
        with self._engine.scope():
            self._model.optimizer.finalize_variable_values(self._model.trainable_weights)
        self._callbacks.on_train_end(logs)
        if self._needs.callbacks:
            self._engine.share_changes()
        if self._policy.after_training().save:
            self._save(final=True, stopped=position.stopped or self._is_stopped())
        return self._model.history

    def _begin(self, start: StartPoint) -> EpochPosition:
        """Calls `on_train_begin`, restores the state of callbacks if the training resumes, and opens the data."""
        assigned = start.checkpoint and self._needs.callbacks
        restored = RestoredValues(self._engine, self._step) if assigned else None
        self._callbacks.on_train_begin()
        if restored:
            restored.assign()
        self._write_graphs()
        self._states = CallbackStates(self._callbacks.callbacks)
        position = epoch_position(self._engine, start, self._schedule, self._states.names, self._totals.size)
        position = self._after_restored_epochs(position)
        self._engine.share_variables()  # a program may have loaded its weights, or a checkpoint, on one task alone
        with self._engine.scope():
            self._engine.open(self._config.data, share=self._config.share, step=self._done, batches=start.batches)
        if position.stopped:
            log.info(
                "a callback, or the evaluator, stopped the training at step %d; set more epochs to continue it",
                self._done,
            )
        self._recorded = position.recorded
        state = start.checkpoint.state if start.checkpoint else TrainingState(0, 0)
        self._epoch_batches = state.epoch_batches
        self._reporter.begin(self._done, position.recorded, state.local_steps)
        self._engine.resume_workers(state.worker_steps)
        if start.checkpoint:
            restore_state = partial(restore_process_state, start.checkpoint, self._states)
            if self._is_within_epoch():
                self._restores = [restore_state, *([restored.assign] if restored else [])]
            else:
                restore_state()
        self._engine.share_changes()  # of the state that was restored
        self._policy.after_resume(epoch_complete=self._is_epoch_complete())
        return position

    def _write_graphs(self) -> None:
        """Writes the graph of the train step for TensorBoard."""
        for callback in self._callbacks.callbacks:
            if isinstance(callback, keras.callbacks.TensorBoard):
                write_train_graph(callback, lambda: self._step.graph(last_build_spec(self._model)))

    def _after_restored_epochs(self, position: EpochPosition) -> EpochPosition:
        """Skips the epochs before `initial_epoch`, or before the one that Keras's `BackupAndRestore` has restored.

        The data starts from its beginning, as in Keras.
        """
        wanted = initial_epoch(self._model) or self._config.initial_epoch
        own = wanted if self._engine.is_chief and not self._start.step else 0
        epochs = int(self._engine.total(np.array([float(own)]))[0])
        if not epochs:
            return position
        if self._schedule.is_open:
            origin = self._schedule.origin - epochs * OPEN_END
            self._schedule = replace(self._schedule, origin=origin, total=self._config.last_step(origin))
        self._done = min(self._schedule.first_step(epochs), self._schedule.total)
        log.info("the training starts after epoch %d", epochs)
        return replace(position, recorded=epochs)

    def _is_complete(self) -> bool:
        return self._done >= self._schedule.total

    def _is_within_epoch(self) -> bool:
        """Returns whether steps are done of an epoch whose end is not recorded."""
        return self._schedule.first_step(self._recorded) < self._done

    def _is_epoch_complete(self) -> bool:
        """Returns whether all steps are done of an epoch whose end is not recorded."""
        return self._done >= self._schedule.last_step(self._recorded) and self._is_within_epoch()

    def _epoch(self, epoch: int, position: EpochPosition) -> dict[str, float]:
        resumes = self._done > self._schedule.first_step(epoch)
        stops_at = self._call_epoch_begin(epoch, position if resumes else None)
        self._reporter.begin_epoch()
        if not resumes:
            self._epoch_batches = 0
            with self._engine.scope():
                self._engine.begin_epoch()
                if self._schedule.begins_pass(self._done):
                    self._engine.begin_pass()
        while not self._is_stopped() and self._done < (target := min(self._reach(epoch), stops_at)):
            boundary = self._policy.last_step(self._done, target, self._schedule.first_step(epoch))
            ends_group = boundary != target or boundary in (self._schedule.last_step(epoch), stops_at)
            self._train(epoch, boundary, ends_group=ends_group)
            self._save_or_terminate()
        self._model.stop_training |= self._done >= stops_at
        logs = written(self._engine, self._totals)
        self._reporter.report("train", self._done, epoch + 1, logs, done=True)
        self._engine.settle(self._done)
        self._end_if_interrupted()
        logs |= self._validate(epoch)
        self._call(self._callbacks.on_epoch_end, epoch, logs)
        self._end_if_interrupted()
        self._recorded = epoch + 1
        if self._done >= self._schedule.last_step(epoch):
            self._epoch_batches = 0
        if self._needs.callbacks:
            self._agree_to_stop()
        return logs

    def _call_epoch_begin(self, epoch: int, resumed: EpochPosition | None) -> int:
        """Resets the metrics, and calls `on_epoch_begin`.

        Args:
            epoch: the epoch.
            resumed: the position from which the training resumes within the epoch.

        Returns:
            The step at which a callback ends the epoch; a very large one if none does.
        """
        self._totals.reset()
        if resumed:
            self._totals.add(resumed.totals)
        if self._needs.epoch_begin or self._needs.each_batch:  # nothing else sees them before the end of the epoch
            write(self._engine, self._totals)
        self._callbacks.on_epoch_begin(epoch)
        for restore in self._restores:  # what `on_epoch_begin` has just changed for the second time
            restore()
        self._restores.clear()
        stops_at = sys.maxsize
        if self._needs.callbacks:
            # Callbacks may have changed some, such as the learning rate. What was restored differs in few.
            share = self._engine.share_variables if resumed else self._engine.share_changes
            share()
            if chief_requests(self._engine, self._is_stopped()):
                stops_at = self._done + self._group_size  # Keras looks at it after the next execution
            self._model.stop_training = False
        return stops_at

    def _reach(self, epoch: int) -> int:
        """Returns the global step up to which an epoch can be trained: its end, or as far as data is known to follow.

        Where data of unknown length ends, the first pass over it ends, and with it the epoch.
        """
        if self._finds_end and self._done < self._schedule.last_step(epoch):
            size = self._schedule.steps_per_execution
            block = _BLOCK * size * (1 if self._engine.synchronous else self._engine.workers)
            if steps := self._steps_ahead(block):
                return min(self._schedule.last_step(epoch), self._done + steps)
            self._end_of_data(epoch)
        return self._schedule.last_step(epoch)

    def _has_data(self, epoch: int) -> bool:
        """Returns whether an epoch has data; a generator may be used up."""
        if not self._finds_end or self._steps_ahead(1):
            return True
        self._end_of_data(epoch)
        return not self._is_complete()

    def _steps_ahead(self, most: int) -> int:
        """Returns how many steps, at most `most`, can be taken before the data ends. All tasks have to call it."""
        batches = batches_per_step(self._engine)
        ahead = cast("ReadAhead", self._config.data).ahead(self._batches, batches, most * batches)
        return self._engine.least(ahead // batches)

    def _end_of_data(self, epoch: int) -> None:
        """Notes that the first pass over data of unknown length has ended after the steps that are done.

        Raises:
            TrainingError: there was no data for a single step.
        """
        self._finds_end = False
        if self._needs.each_batch and self._group.begun:
            last = self._done - 1 - self._schedule.first_step(epoch)
            self._group.end(last, written_for_callbacks(self._engine, self._totals), data_ended=True)
            self._agree_to_stop()
        if not self._batches:
            raise TrainingError(
                f"the training data has no full batch for each of {self._engine.sharers} workers",
                code="no-full-batch",
                hint="use a smaller batch_size, fewer workers, or more data",
            )
        wanted = self._schedule.total
        if not cast("ReadAhead", self._config.data).repeat:
            epochs = epoch + (self._done > self._schedule.first_step(epoch))
            if epochs < self._schedule.epochs or self._done < self._schedule.last_step(epoch) < OPEN_END:
                log.warning(
                    "your input ran out of data after step %d, and cannot be read again: the training ends with epoch "
                    "%d of %d; pass a dataset, or a generator that yields steps_per_epoch * epochs batches",
                    self._done, epochs, self._schedule.epochs,
                )  # fmt: skip
            self._schedule = replace(self._schedule, total=self._done)
        elif self._schedule.is_open or not self._schedule.origin:
            self._schedule, self._config = self._schedule.with_pass(self._done, epoch, self._config)
            if self._config.steps_per_epoch != self._config.steps_per_pass:
                warn_of_short_epochs(self._config.steps_per_epoch, self._config.steps_per_pass)
        if cast("ReadAhead", self._config.data).repeat and not self._is_complete():
            with self._engine.scope():
                self._engine.begin_pass()
        if wanted != self._schedule.total:
            self._reporter.set_length(self._schedule.total, self._schedule.epochs)

    def _train(self, epoch: int, boundary: int, *, ends_group: bool) -> None:
        """Trains up to global step `boundary`, or to a pause, or until the workers have changed.

        Args:
            epoch: the current epoch.
            boundary: the global step.
            ends_group: whether a group of batches ends there, though it is not full.
        """
        if self._workers_changed(epoch):
            return
        one_by_one = self._needs.each_batch and self._engine.one_by_one
        for execution in self._executions(epoch, boundary, one_by_one=one_by_one):
            # An execution without losses only reports dropped gradients.
            each_batch = self._needs.each_batch and len(execution.losses)
            if each_batch:
                self._engine.read_updates()  # for callbacks
                if not one_by_one:
                    self._group.begin(execution.first - self._schedule.first_step(epoch))
            self._count(execution, epoch)
            if each_batch:
                self._end_group(epoch, boundary if ends_group else None)
                if not one_by_one:
                    self._engine.share_changes()

    def _workers_changed(self, epoch: int) -> bool:
        """Takes workers that have joined; returns whether the epoch has another number of steps now."""
        if not self._engine.change_workers(self._done):
            return False
        self._batches += -self._batches % batches_per_step(self._engine)  # as in the data of the workers of now
        self._sharers, steps_of_pass = self._engine.sharers, self._config.steps_of_pass
        if steps_of_pass is None:
            return False
        try:
            config = replace(self._config, steps_per_epoch=steps_of_pass(self._sharers)).within_keras_limits()
        except TrainingError as error:
            log.warning("epochs keep their %d steps: %s", self._schedule.steps_per_epoch, error.message)
            return False
        steps = self._done - self._schedule.first_step(epoch)
        done = steps_of_now(steps, self._epoch_batches, self._schedule.steps_per_epoch, self._engine, config)
        self._schedule = self._schedule.resized(self._done, epoch, done, config)
        self._reporter.set_length(self._schedule.total, self._schedule.epochs)
        return True

    def _executions(self, epoch: int, boundary: int, *, one_by_one: bool) -> Iterator[Execution]:
        """Yields the executions up to `boundary` or to a pause, or until the workers have changed.

        If they run one by one, each begins after callbacks were called for the one before, since a callback may assign
        variables. The workers change between two groups of batches.
        """
        size, adapts = self._schedule.steps_per_execution, self._schedule.adapts
        while self._done < boundary and not self._pause.agreed():
            left = boundary - self._done
            steps = (size if size <= left else 1) if one_by_one else left
            if one_by_one and not self._group.begun:
                if self._workers_changed(epoch):
                    return
                self._group.begin(self._done - self._schedule.first_step(epoch))
                self._engine.share_changes()  # the chief's callbacks may have made some
            try:
                yield from self._engine.run(steps, first=self._done, size=size, adapts=adapts, pause=self._pause)
            except WorkersLost as error:
                raise Terminated(
                    f"SIGTERM received: {error} is lost, so what follows the last checkpoint is not saved",
                    code="terminated",
                ) from error
            if not one_by_one and self._workers_changed(epoch):
                return

    def _count(self, execution: Execution, epoch: int) -> None:
        """Adds an execution to the metrics and the report."""
        not_finite = np.flatnonzero(~np.isfinite(execution.losses))
        if not_finite.size and not self._needs.end_on_nan:
            raise self._loss_not_finite(execution, int(not_finite[0]))
        self._totals.add(execution.metrics)
        self._reporter.count(execution)
        self._done += len(execution.losses)
        batches = len(execution.losses) * batches_per_step(self._engine)
        self._batches += batches
        self._epoch_batches += batches
        self._pause.count(execution.votes)
        if self._reporter.due():
            self._reporter.report("train", self._done, epoch + 1, self._totals.logs())

    def _loss_not_finite(self, execution: Execution, index: int) -> TrainingError:
        workers = " and ".join(execution.steps) if not self._engine.synchronous else "all workers"
        return TrainingError(
            f"the loss is {execution.losses[index]} at step {execution.first + index + 1} (taken by {workers})",
            code="loss-not-finite",
            hint="lower the learning rate, clip gradients (clipnorm), or look for such values in the data",
        )

    def _end_group(self, epoch: int, boundary: int | None) -> None:
        """Calls `on_train_batch_end` if the group of batches is full, or a checkpoint may be saved next."""
        last = self._done - 1 - self._schedule.first_step(epoch)
        if not (self._group.is_full(last) or self._done == boundary or self._pause.agreed()):
            return
        data_ended = self._done == self._schedule.first_step(epoch + 1)
        self._group.end(last, written_for_callbacks(self._engine, self._totals), data_ended=data_ended)
        self._agree_to_stop()

    def _save_or_terminate(self) -> None:
        """Saves a checkpoint if one is due; on SIGTERM, ends the training.

        Raises:
            Terminated: a task received SIGTERM.
        """
        requests = None
        if self._pause.agreed() and not self._is_stopped():
            requests = self._engine.total(self._policy.requests())
            self._pause.reset()
        decision = self._policy.after_steps(self._done, epoch_complete=self._is_epoch_complete(), requests=requests)
        if decision.terminate:
            self._terminate()
        if decision.save:
            self._save()
            self._ask_evaluator()

    def _terminate(self) -> NoReturn:
        """Saves a checkpoint, and ends the training. All tasks have to call it.

        Raises:
            Terminated: always.
        """
        self._save(last=True)
        self._engine.total(np.zeros(1))  # every task waits here until the chief has saved
        raise Terminated(f"SIGTERM received: training ended after step {self._done}", code="terminated")

    def _call(self, hook: Callable[..., None], *args: Any) -> None:
        """Calls a hook of callbacks. One that evaluates when SIGTERM is received ends early."""
        try:
            hook(*args)
        except Terminated:
            self._interrupted = True
            log.warning("SIGTERM has interrupted %s of a callback", hook.__name__)

    def _end_if_interrupted(self) -> None:
        """Ends the training if SIGTERM has interrupted a hook: the end of this epoch is not recorded.

        Raises:
            Terminated: it has.
        """
        if self._needs.callbacks and chief_requests(self._engine, self._interrupted):
            self._terminate()

    def _validate(self, epoch: int) -> dict[str, float]:
        """Evaluates the validation data if it is due after this epoch. Returns the metrics as `val_NAME`."""
        validation = self._config.validation
        if validation is None or not validation.is_due(epoch + 1, last=self._is_complete()):
            return {}
        emit("state", state="evaluating")
        try:
            metrics = self._evaluation.run(validation)
        except Terminated:
            self._terminate()
        advance(validation.data, validation.steps)
        self._reporter.report(validation.name, self._done, epoch + 1, metrics)
        emit("state", state="training")
        return {f"val_{name}": value for name, value in metrics.items()}

    def _is_stopped(self) -> bool:
        return bool(self._model.stop_training)

    def _agree_to_stop(self) -> None:
        """Sets `stop_training` on every task to the chief's. All tasks have to call it."""
        self._model.stop_training = chief_requests(self._engine, self._is_stopped())
        if self._is_stopped():
            self._pause.agree()

    def _ask_evaluator(self) -> None:
        """Stops the training, after a checkpoint, if the evaluator has found no better one for long."""
        if not self._config.evaluator_stops or self._config.checkpoints is None:
            return
        if self._engine.is_chief and (reason := stop_reason(self._config.checkpoints.folder.evaluated())):
            log.info("the evaluator ends the training after step %d: %s", self._done, reason)
            self._model.stop_training = True
        self._agree_to_stop()

    def _save(self, *, last: bool = False, final: bool = False, stopped: bool = False) -> None:
        """Saves a checkpoint.

        Args:
            last: whether the process exits after it.
            final: whether the training is complete.
            stopped: whether a callback has stopped the training.
        """
        self._engine.settle(self._done)
        self._policy.saved()
        if self._writer is None:
            return
        callbacks, arrays = self._states.save()
        state = TrainingState(
            self._done,
            self._recorded,
            final,
            self._schedule.total if stopped else 0,
            self._schedule.steps_per_epoch,
            self._schedule.origin,
            self._sharers,
            self._batches,
            self._epoch_batches,
            self._totals.packed(),
            callbacks,
            random_states(),
            steps_per_pass=self._schedule.steps_per_pass or 0,
            local_steps=self._reporter.local_steps,
            worker_steps=self._engine.worker_steps,
            lengths=list(self._config.lengths),
        )
        with self._engine.scope():
            self._writer.save(CheckpointContent(state, arrays, self._end_changes), wait=last or final)


class _Pause:
    """`engine.Pause` of a training loop, agreed on if a task voted for it or a callback stopped the training."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        self._policy = policy
        self._agreed = False

    def wanted(self) -> bool:
        return self._policy.wants_pause()

    def agreed(self) -> bool:
        return self._agreed

    def ends(self) -> bool:
        return self._policy.wants_end()

    def agree(self) -> None:
        self._agreed = True

    def count(self, votes: int) -> None:
        self._agreed = self._agreed or votes > 0

    def reset(self) -> None:
        self._agreed = False


def _checkpoint_policy(config: TrainingConfig, engine: Engine, sigterm: SigtermRequest) -> CheckpointPolicy:
    checkpoints = config.checkpoints
    return CheckpointPolicy(
        enabled=checkpoints is not None,
        every_steps=checkpoints.every_steps if checkpoints else None,
        steps_per_round=1 if engine.synchronous else config.rules.updates.steps_per_round,
        every_seconds=checkpoints.every_seconds if checkpoints and engine.is_chief else None,
        termination_requested=sigterm.is_received,
    )
