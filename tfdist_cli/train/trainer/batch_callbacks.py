"""What Keras callbacks need of a training or an evaluation: which hooks they use, and when batch hooks are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfdist_cli.train.engine.base import Engine
from tfdist_cli.train.tf_compat.keras_model import is_default, profiles_batches

_TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
_PREDICT_HOOKS = ("on_predict_batch_begin", "on_predict_batch_end")


def acts_on_batches(callback: Any) -> bool:
    """Returns whether a Keras callback acts on training batches."""
    return any(_acts(callback, hook) for hook in _TRAIN_HOOKS)


def acts_on_test_batches(callback: Any) -> bool:
    """Returns whether a Keras callback acts on validation batches."""
    return any(_acts(callback, hook) for hook in _TEST_HOOKS)


def acts_on_predicted_batches(callback: Any) -> bool:
    """Returns whether a Keras callback acts on the batches of a prediction."""
    return any(_acts(callback, hook) for hook in _PREDICT_HOOKS)


def _acts(callback: Any, hook: str) -> bool:
    """Returns whether a hook does something. Some callbacks return from it at once if they act on epochs."""
    method = getattr(callback, hook)
    if is_default(method):
        return False
    for kind in type(callback).__mro__:
        if acts_on_epochs := _ACTS_ON_EPOCHS.get(_name(kind)):
            inherited = getattr(kind, hook, None) is getattr(method, "__func__", None)
            return not (inherited and acts_on_epochs(callback))
    return True


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _saves_epochs(callback: Any) -> bool:
    return callback.save_freq == "epoch"


_WANDB = "wandb.integration.keras.callbacks"
_ACTS_ON_EPOCHS: dict[str, Callable[[Any], bool]] = {
    _name(keras.callbacks.ModelCheckpoint): _saves_epochs,
    _name(keras.callbacks.BackupAndRestore): _saves_epochs,
    _name(keras.callbacks.TensorBoard): lambda callback: (
        callback.update_freq == "epoch" and not profiles_batches(callback)
    ),
    "mlflow.keras.callback.MlflowCallback": lambda callback: callback.log_every_n_steps is None,
    f"{_WANDB}.metrics_logger.WandbMetricsLogger": lambda callback: not callback.logging_batch_wise,
    f"{_WANDB}.model_checkpoint.WandbModelCheckpoint": _saves_epochs,
}
"""Callbacks that act on batches only if configured to, by the names of their classes: other libraries' are not
imported. The function returns whether a callback is not configured to."""
if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # in Keras 3.13 and later
    _ACTS_ON_EPOCHS[_name(keras.callbacks.OrbaxCheckpoint)] = _saves_epochs


def chief_requests(engine: Engine, own: bool) -> bool:
    """Returns the chief's request on every task. All tasks that run the engine's loop have to call it."""
    return bool(engine.total(np.array([float(own and engine.is_chief)]))[0])


@dataclass(frozen=True)
class CallbackNeeds:
    """What the chief's callbacks need of all tasks.

    Args:
        callbacks: whether there are callbacks.
        each_batch: whether one acts on training batches.
        each_test_batch: whether one acts on validation batches.
        epoch_begin: whether one acts when an epoch begins.
        end_on_nan: whether one ends the training at a loss that is not finite.
    """

    callbacks: bool
    each_batch: bool
    each_test_batch: bool
    epoch_begin: bool
    end_on_nan: bool

    @classmethod
    def of_chief(cls, engine: Engine, callbacks: Sequence[Any]) -> CallbackNeeds:
        """Returns what the chief's callbacks need; a program may give callbacks to its chief alone."""
        own = (
            bool(callbacks),
            any(map(acts_on_batches, callbacks)),
            any(map(acts_on_test_batches, callbacks)),
            not all(is_default(callback.on_epoch_begin) for callback in callbacks),
            any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks),
        )
        chiefs = engine.total(np.array(own, np.float64) * engine.is_chief) > 0
        return cls(*map(bool, chiefs))


@dataclass
class BatchGroup:
    """Calls a pair of hooks as Keras does: once for every `steps_per_execution` batches.

    Keras passes the number of the group's first batch to `begin`. It passes the number of the last batch of a full
    group to `end`, even if the data ends before that.

    Args:
        on_begin: called with the number of the first batch.
        on_end: called with the number of the last batch, and the logs.
        size: batches in a group.
    """

    on_begin: Callable[[int], None]
    on_end: Callable[[int, Any], None]
    size: int
    _first: int | None = None

    @property
    def begun(self) -> bool:
        """Whether a group has begun and not ended."""
        return self._first is not None

    def begin(self, batch: int) -> bool:
        """Begins a group with a batch if none has begun. Returns whether it did."""
        if self._first is not None:
            return False
        self._first = batch
        self.on_begin(batch)
        return True

    def is_full(self, batch: int) -> bool:
        """Returns whether this batch is the last one of the group that has begun."""
        return self._first is not None and batch - self._first + 1 >= self.size

    def end(self, batch: int, logs: Any, *, data_ended: bool = False) -> None:
        """Ends the group if one has begun.

        Args:
            batch: the last batch done.
            logs: the metrics so far.
            data_ended: whether this pass has no more batches.
        """
        if self._first is None:
            return
        last = max(batch, self._first + self.size - 1) if data_ended else batch
        self._first = None
        self.on_end(last, logs)
