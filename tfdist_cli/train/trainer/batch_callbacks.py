"""Batch hooks of Keras callbacks: which callbacks use them, and when they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from tfdist_cli.train.tf_compat.keras_model import is_default, profiles_batches

_TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def acts_on_batches(callback: Any) -> bool:
    """Returns whether a Keras callback acts on training batches."""
    return any(_acts(callback, hook) for hook in _TRAIN_HOOKS)


def acts_on_test_batches(callback: Any) -> bool:
    """Returns whether a Keras callback acts on validation batches."""
    return any(_acts(callback, hook) for hook in _TEST_HOOKS)


def _acts(callback: Any, hook: str) -> bool:
    """Returns whether a hook does something. Some of Keras's callbacks return from it at once if they act on epochs."""
    method = getattr(callback, hook)
    if is_default(method):
        return False
    kind = next((kind for kind in _ACTS_ON_EPOCHS if isinstance(callback, kind)), None)
    inherited = kind and getattr(kind, hook, None) is getattr(method, "__func__", None)
    return not (inherited and _ACTS_ON_EPOCHS[kind](callback))


_ACTS_ON_EPOCHS: dict[Any, Callable[[Any], bool]] = {
    keras.callbacks.ModelCheckpoint: lambda callback: callback.save_freq == "epoch",
    keras.callbacks.BackupAndRestore: lambda callback: callback.save_freq == "epoch",
    keras.callbacks.TensorBoard: lambda callback: callback.update_freq == "epoch" and not profiles_batches(callback),
}
"""Keras's callbacks that act on batches only if configured to; the function returns whether one is not."""


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
