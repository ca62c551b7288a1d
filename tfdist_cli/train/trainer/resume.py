"""Going on from the newest whole checkpoint, in all tasks alike, as if nothing had happened in between."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import keras
import numpy as np

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.train.checkpoint.callback_state import CallbackStates, restore_random_states
from tfdist_cli.train.checkpoint.store import CheckpointFolder, Found, TrainingState
from tfdist_cli.train.engine.base import Engine
from tfdist_cli.train.model.train_step import ModelStep, values
from tfdist_cli.train.optimizers.apply import learning_rates
from tfdist_cli.train.trainer.config import Schedule, TrainingConfig

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Start:
    """Where a training starts.

    A training that goes on with another number of workers keeps its place: as many epochs, and as much of the one
    under way, are done as before. Where an epoch now has another number of steps, so that it no longer follows from
    the global step, `origin` says from where epochs are counted.

    Args:
        step: global steps done.
        origin: the global step at which the first epoch would have begun had all had as many steps as they have now.
        batches: batches of the data that all workers together have taken.
        found: on the chief, the checkpoint that it goes on from.
    """

    step: int = 0
    origin: int = 0
    batches: int = 0
    found: Found | None = None

    def taken(self, done: int, engine: Engine) -> int:
        """Batches that all workers together have taken when `done` global steps are done."""
        return self.batches + (done - self.step) * _batches_per_step(engine)


@dataclass(frozen=True)
class Position:
    """How far a training has come, beside its steps; the same in all tasks.

    Args:
        ended: epochs whose end has been dealt with; the last one of them may have been cut short.
        stopped: whether a callback has ended the training.
        totals: what the metrics have counted in the epoch under way, as `MetricTotals` packs it.
    """

    ended: int
    stopped: bool
    totals: np.ndarray


def resume(engine: Engine, step: ModelStep, assignment: TrainingConfig) -> Start:
    """Restores the newest whole checkpoint on the chief, and gives it to the others.

    Raises:
        TrainingError: there are checkpoints, and none is whole; or none could be written.
    """
    if assignment.saving is None:
        return Start()
    found = _restored(assignment.saving.folder, step) if engine.is_chief else None
    own = _places(found.state, engine, assignment.steps_per_epoch) if found else (0, 0, 0)
    done, origin, batches = (int(number) for number in engine.total(np.array(own, np.float64)))
    if done:
        engine.share_variables()
    return Start(done, origin, batches, found)


def _places(state: TrainingState, engine: Engine, steps_per_epoch: int) -> tuple[int, int, int]:
    """The step, origin and batches that a training starts with."""
    if not state.sharers:
        return state.step, 0, state.step * _batches_per_step(engine)
    if state.sharers == engine.sharers:
        return state.step, state.origin, state.batches
    log.info("there were %d workers, now there are %d: they divide the data anew", state.sharers, engine.sharers)
    within = state.step - state.origin - state.epoch * state.steps_per_epoch
    share = round(within * steps_per_epoch / state.steps_per_epoch)
    return state.step, state.step - state.epoch * steps_per_epoch - share, state.batches


def _batches_per_step(engine: Engine) -> int:
    return engine.sharers if engine.synchronous else 1


def position(engine: Engine, start: Start, schedule: Schedule, names: list[str], size: int) -> Position:
    """Where in its epochs a training is. All tasks have to call it.

    Args:
        engine: by which the others learn of it.
        start: where it starts.
        schedule: how long it is to be.
        names: the chief's callbacks.
        size: how many numbers metrics count in.
    """
    ended, stopped, totals = schedule.epoch(start.step), False, np.zeros(size)
    if start.found:
        state = start.found.state
        if state.steps_per_epoch == schedule.steps_per_epoch or state.sharers not in (0, engine.sharers):
            ended = state.epoch
            totals = np.array(state.totals) if len(state.totals) == size else totals
        same = [entry["callback"] for entry in state.callbacks] == names
        stopped = same and state.final and _reached(state, schedule)
    own = np.array([ended, stopped, *totals], np.float64) * engine.is_chief
    agreed = engine.total(own)
    return Position(int(agreed[0]), bool(agreed[1]), agreed[2:])


def _reached(state: TrainingState, schedule: Schedule) -> bool:
    """Whether the training that a callback has ended would have gone as far as this one is to."""
    if state.origin == schedule.origin:
        return state.stopped >= schedule.total
    epochs = (state.stopped - state.origin) / state.steps_per_epoch
    return state.stopped > 0 and epochs >= (schedule.total - schedule.origin) / schedule.steps_per_epoch


def rates_of(engine: Engine, model: keras.Model) -> list[float]:
    """The optimizer's learning rates on the chief that are variables."""
    return [float(value.numpy()) for value in values(learning_rates(model.optimizer))] if engine.is_chief else []


def take_back(engine: Engine, found: Found, model: keras.Model, states: CallbackStates, rates: list[float]) -> None:
    """Gives callbacks, random number generators and the learning rate back what they had when all was saved.

    Args:
        engine: runs the steps.
        found: the checkpoint.
        model: the model, restored.
        states: the callbacks, which have heard what begins.
        rates: the learning rates as they were restored: hearing of it, callbacks may have changed it once more.
    """
    states.restore(found.state.callbacks, found.arrays())
    restore_random_states(found.state.random)
    with engine.scope():
        for variable, rate in zip(learning_rates(model.optimizer), rates, strict=False):  # none but on the chief
            variable.assign(rate)


def _restored(folder: CheckpointFolder, step: ModelStep) -> Found | None:
    folder.begin()
    found, damaged = folder.newest()
    for number, reason in damaged.items():
        log.warning("checkpoint of step %d is damaged, and left out: %s", number, reason)
        emit("checkpoint_damaged", step=number, reason=reason)
    if found is None:
        if damaged:
            raise TrainingError(
                f"no checkpoint in {folder.path} is whole: {next(iter(damaged.values()))}",
                hint="name another checkpoint.dir to start anew, or remove the damaged ones",
            )
        return None
    for number in damaged:
        _set_aside(folder, number)
    folder.restore(found, step)
    log.info("resuming from %s (step %d)", found.path, found.state.step)
    emit("resumed", step=found.state.step, path=str(found.path))
    return found


def _set_aside(folder: CheckpointFolder, step: int) -> None:
    try:
        log.warning("it is kept as %s", folder.set_aside(step))
    except OSError as error:
        log.warning("it stays where it is: %s", error)
