"""Scales the loss of one batch so that the mean over all batches of an update is the loss of the update.

Each worker or replica computes the loss of its own batch. Engines average the gradients of these losses. For a loss
that is a mean over examples, this average is the gradient of the whole update. A loss passed to compile() with
`reduction="sum"` is multiplied by the number of batches. So is one with `reduction="none"`, whose gradient in Keras is
that of the sum. Losses from add_loss() or an overridden compute_loss() are taken as means.

Keras itself divides by the number of replicas in some places (mean `Loss` objects, `add_loss`), and not in others
(`compute_loss`). Within a step this division is disabled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.tf_compat.keras_model import replace_losses, skip_loss_scaling


class _Scope(threading.local):
    """The number of batches per update of the step that this thread computes; None outside of a step."""

    batches: int | tf.Tensor | None = None


_scope = _Scope()


@contextlib.contextmanager
def batches_per_update(batches: int | tf.Tensor) -> Iterator[None]:
    """Within the context, Keras computes the loss of one of several batches that are combined into an update.

    Args:
        batches: the number of batches per update; if they have different sizes, a tensor: how many times as many
            examples as this batch the update has.
    """
    _disable_replica_scaling_in_steps()
    before = _scope.batches
    _scope.batches = batches
    try:
        yield
    finally:
        _scope.batches = before


def wrap_sum_losses(model: keras.Model) -> None:
    """Makes the compiled losses with `reduction="sum"` scale with the number of batches per update.

    Args:
        model: a compiled model, built.
    """
    replace_losses(model, _per_update)


def _per_update(loss: Any) -> Any:
    is_sum = getattr(loss, "reduction", None) == "sum" and not isinstance(loss, _SumLoss)
    return _SumLoss(loss) if is_sum else loss


def minimized(loss: tf.Tensor) -> tf.Tensor:
    """Returns the tensor to minimize for a batch.

    Args:
        loss: a scalar, or one value per example (`reduction="none"`). Gradients sum the latter, so it is multiplied by
            the number of batches per update.
    """
    return _times_batches(loss) if loss.shape.rank else loss


def _times_batches(value: tf.Tensor) -> tf.Tensor:
    batches = _scope.batches
    is_one = batches is None or (isinstance(batches, int) and batches <= 1)
    return value if is_one else value * tf.cast(batches, value.dtype)


class _SumLoss:
    """A loss with `reduction="sum"`, multiplied by the number of batches per update."""

    reduction = "sum"

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _times_batches(self._loss(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)


@cache
def _disable_replica_scaling_in_steps() -> None:
    """Patches Keras, for the whole process: within a step it does not scale a loss by the number of replicas."""
    skip_loss_scaling(lambda: _scope.batches is not None)
