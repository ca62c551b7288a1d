"""Resuming from the newest undamaged checkpoint, on all tasks, as if the training had never stopped."""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.callback_state import CallbackStates, restore_random_states
from tfdist_cli.train.checkpoint.files.state import StoredCheckpoint, TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.data.shard import empty_shard
from tfdist_cli.train.engine.base import Engine
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.config.schedule import Schedule
from tfdist_cli.train.trainer.config.training import OPEN_END, Counting, TrainingConfig, steps_of_epochs
from tfdist_cli.train.variables.sharding import parts

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class StartPoint:
    """The point at which a training starts: the beginning, or a checkpoint.

    A training that resumes with another number of workers keeps its place: as many epochs, and as large a part of the
    current one, are done as before. If the number of steps in an epoch has changed, the epoch no longer follows from
    the global step; then `origin` is the step from which epochs are counted.

    Args:
        step: global steps done.
        origin: the global step at which the first epoch would have begun if all epochs had as many steps as now.
        batches: batches of the data that all workers together have trained on.
        checkpoint: on the chief, the checkpoint that the training resumes from.
    """

    step: int = 0
    origin: int = 0
    batches: int = 0
    checkpoint: StoredCheckpoint | None = None


@dataclass(frozen=True)
class EpochPosition:
    """The position of a training within its epochs; the same on all tasks.

    Args:
        recorded: epochs whose end is recorded; the last one of them may have been cut short.
        stopped: whether a callback has stopped the training.
        totals: the sums of the metrics in the current epoch, as `MetricTotals` packs them.
    """

    recorded: int
    stopped: bool
    totals: np.ndarray


def restore_checkpoint(engine: Engine, step: ModelStep, config: TrainingConfig) -> tuple[StartPoint, TrainingConfig]:
    """Restores the newest undamaged checkpoint on the chief; the loop sends its variables to the other tasks.

    Returns:
        The start, and the configuration with the length of the data, if it was found or is counted now.

    Raises:
        TrainingError: there are checkpoints, and all of them are damaged; or the folder is not writable; or the data to
            count is empty. All tasks raise an error.
    """
    checkpoint = _restored_by_chief(engine, step, config.checkpoints.folder) if config.checkpoints else None
    config = _with_length(engine, config, checkpoint.state if checkpoint else TrainingState(0, 0))
    if config.checkpoints is None:
        return StartPoint(), config
    own = _counts(checkpoint.state, engine, config) if checkpoint else (0, 0, 0)
    done, origin, batches = (int(number) for number in engine.total(np.array(own, np.float64)))
    return StartPoint(done, origin, batches, checkpoint), config


def _restored_by_chief(engine: Engine, step: ModelStep, folder: CheckpointFolder) -> StoredCheckpoint | None:
    """Restores the newest checkpoint on the chief, where there is one. If that fails, no task waits for the chief."""
    checkpoint, failure = None, None
    if engine.is_chief:
        try:
            checkpoint = _restore(folder, step)
        except TrainingError as error:
            failure = error
    if engine.total(np.array([float(failure is not None)]))[0]:
        raise failure or TrainingError(
            "the chief cannot use the checkpoints", code="chief-failed", hint="see the chief's error"
        )
    return checkpoint


def _with_length(engine: Engine, config: TrainingConfig, state: TrainingState) -> TrainingConfig:
    """Returns the configuration with the length of the data: from the checkpoint of as many workers, or counted now."""
    same = state.sharers == engine.sharers
    if counting := config.counting:
        number = len(counting.shards)
        stored = np.array(state.lengths if same and len(state.lengths) == number else [0] * number, np.float64)
        lengths = engine.total(stored * engine.is_chief)
        if not lengths.any():
            lengths = _count(engine, counting)
        counted = counting.configured([int(length) for length in lengths]).within_keras_limits()
        return replace(counted, checkpoints=config.checkpoints)
    if not config.finds_end:
        return config
    found = engine.total(np.array([float(state.steps_per_pass if same else 0)]))
    return config.with_pass(int(found[0])) if found[0] else config


def _count(engine: Engine, counting: Counting) -> np.ndarray:
    """Counts the data on the tasks that read it.

    Raises:
        TrainingError: a shard is empty.
    """
    emit("state", state="counting")
    begun = time.monotonic()
    if engine.is_chief:
        log.info("reading all data once to count it, since its length is not known; steps_per_epoch saves this time")
    lengths = engine.count(counting.data, counting.shards)
    if engine.is_chief:
        shards = ", ".join(f"{length:.0f}" for length in lengths)
        log.info("counted in %.1f s: %s elements", time.monotonic() - begun, shards)
    for shard, length in zip(counting.shards, lengths, strict=True):
        if not length:
            raise empty_shard(shard)
    return lengths


def _counts(state: TrainingState, engine: Engine, config: TrainingConfig) -> tuple[int, int, int]:
    """Returns the step, origin and batches of a training that resumes from a state."""
    if not state.sharers:
        return state.step, 0, state.step * batches_per_step(engine)
    if state.sharers == engine.sharers:
        return state.step, state.origin, state.batches
    log.info("the number of workers changed from %d to %d: the data is divided anew", state.sharers, engine.sharers)
    epoch, steps = _position_in_epoch(state)
    batches = state.epoch_batches or steps * (state.sharers if engine.synchronous else 1)
    done = steps_of_now(steps, batches, state.steps_per_epoch, engine, config)
    epochs = steps_of_epochs(epoch, config.steps_per_epoch, config.steps_per_pass)
    return state.step, state.step - epochs - done, _position(epochs + done, state, engine, config)


def _position_in_epoch(state: TrainingState) -> tuple[int, int]:
    """Returns the epoch in which a training has stopped, and how many steps of it are done.

    The end of the last epoch is recorded also if it was cut short.
    """
    for epoch in (state.epoch, state.epoch - 1):
        steps = state.step - state.origin - steps_of_epochs(epoch, state.steps_per_epoch, state.steps_per_pass or None)
        if steps >= 0:
            break
    return epoch, steps


def steps_of_now(steps: int, batches: int, steps_per_epoch: int, engine: Engine, config: TrainingConfig) -> int:
    """Returns the steps of the current epoch that are done, counted in steps of the workers of now.

    If an epoch is one pass over the data, what is left of it is as many full steps as the batches that are left make.
    So an epoch never has more examples than the data, however often the number of workers changes within it.

    Args:
        steps: the steps of the epoch that are done, by the number of workers so far.
        batches: the batches of the data that were trained on in the epoch.
        steps_per_epoch: the steps of an epoch so far.
        engine: runs the steps of now.
        config: its `steps_per_epoch` are those of an epoch from now on.
    """
    if config.share == "copy" or not (config.steps_of_pass or OPEN_END in (config.steps_per_epoch, steps_per_epoch)):
        return round(steps * config.steps_per_epoch / steps_per_epoch)
    return min(math.ceil(batches / batches_per_step(engine)), config.steps_per_epoch)


def _position(steps: int, state: TrainingState, engine: Engine, config: TrainingConfig) -> int:
    """Returns after which batch of the data the workers of now continue: at the beginning of a step of theirs.

    Args:
        steps: the steps that the workers of now would have taken to get here.
        state: the state of the training.
        engine: runs the steps of now.
        config: the configuration.
    """
    each = batches_per_step(engine)
    if config.steps_of_pass or config.share == "copy":
        return steps * each  # the end of an epoch stays the end of a pass
    return math.ceil(state.batches / each) * each


def batches_per_step(engine: Engine) -> int:
    """Returns how many batches of the data one step takes."""
    return engine.sharers if engine.synchronous else 1


def epoch_position(
    engine: Engine, start: StartPoint, schedule: Schedule, callbacks: list[str], totals_size: int
) -> EpochPosition:
    """Returns the position of a training within its epochs. All tasks have to call it.

    Args:
        engine: runs the steps.
        start: where the training starts.
        schedule: the length of the training.
        callbacks: the names of the chief's callbacks, as `CallbackStates` gives them.
        totals_size: the size of the packed `MetricTotals`.
    """
    recorded, stopped, totals = schedule.epoch(start.step), False, np.zeros(totals_size)
    if start.checkpoint:
        state = start.checkpoint.state
        if state.steps_per_epoch == schedule.steps_per_epoch or state.sharers not in (0, engine.sharers):
            recorded = state.epoch
            totals = np.array(state.totals) if len(state.totals) == totals_size else totals
        same_callbacks = [entry["callback"] for entry in state.callbacks] == callbacks
        stopped = same_callbacks and state.final and _would_have_reached(state, schedule)
    own = np.array([recorded, stopped, *totals], np.float64) * engine.is_chief
    agreed = engine.total(own)
    return EpochPosition(int(agreed[0]), bool(agreed[1]), agreed[2:])


def _would_have_reached(state: TrainingState, schedule: Schedule) -> bool:
    """Returns whether a training that a callback stopped was to be at least as long as this one."""
    if state.origin == schedule.origin:
        return state.stopped >= schedule.total
    epochs = (state.stopped - state.origin) / state.steps_per_epoch
    return state.stopped > 0 and epochs >= (schedule.total - schedule.origin) / schedule.steps_per_epoch


class RestoredValues:
    """What was restored of the variables that hooks of callbacks assign: the model's state, and optimizers' scalars.

    `on_train_begin` assigns them once more in a launch that resumes, and `on_epoch_begin` within an epoch. Each value
    is held on the device of its variable, and shares its memory until one of them assigns the variable.

    Args:
        engine: runs the steps.
        step: the model, restored.
    """

    def __init__(self, engine: Engine, step: ModelStep) -> None:
        self._engine = engine
        scalars = [variable for variable in step.optimizer_variables if len(variable.shape) == 0]
        self._values: list[tuple[Any, tf.Tensor]] = []
        with engine.scope():
            for part in itertools.chain.from_iterable(map(parts, [*step.state, *scalars])):
                with tf.device(part.device):
                    self._values.append((part, tf.convert_to_tensor(part)))

    def assign(self) -> None:
        """Assigns the values again."""
        with self._engine.scope():
            for part, value in self._values:
                with tf.device(part.device):
                    part.assign(value)


def restore_process_state(checkpoint: StoredCheckpoint, states: CallbackStates) -> None:
    """Restores what is not a variable of the model: callbacks and random number generators.

    Args:
        checkpoint: the checkpoint.
        states: the callbacks; their `on_train_begin` was called.
    """
    states.restore(checkpoint.state.callbacks, checkpoint.arrays())
    restore_random_states(checkpoint.state.random)


def _restore(folder: CheckpointFolder, step: ModelStep) -> StoredCheckpoint | None:
    folder.prepare()
    checkpoint, damaged = folder.newest()
    for number, reason in damaged.items():
        log.warning("checkpoint of step %d is damaged and is skipped: %s", number, reason)
        emit("checkpoint_damaged", step=number, reason=reason)
    if checkpoint is None:
        if damaged:
            raise TrainingError(
                f"all checkpoints in {folder.location} are damaged: {next(iter(damaged.values()))}",
                code="checkpoint-damaged",
                hint="set another checkpoint.dir to train from the beginning, or remove the damaged checkpoints",
            )
        return None
    for number in damaged:
        _set_aside(folder, number)
    folder.restore(checkpoint, step)
    log.info("resuming from %s (step %d)", checkpoint.location, checkpoint.state.step)
    emit("resumed", step=checkpoint.state.step, path=str(checkpoint.location))
    return checkpoint


def _set_aside(folder: CheckpointFolder, step: int) -> None:
    try:
        log.warning("the damaged checkpoint is renamed to %s", folder.set_aside(step))
    except OSError as error:
        log.warning("the damaged checkpoint cannot be renamed: %s", error)
