"""What the loss of several batches is that make one update together.

Each worker, or replica, computes the loss of its own batch, and engines take the mean of these, and of their
gradients. So a batch's loss has to be such that this mean is the loss of all batches together. That holds for a mean
over examples as it is. A loss that compile() was given and that is a sum (`reduction="sum"`) is multiplied by the
number of batches, and so is one that keeps a value for each example (`reduction="none"`), of which Keras's gradient is
that of the sum. What a model adds by itself, in add_loss() or a compute_loss() of its own, is taken as a mean.

Keras divides by the number of replicas already in some places (its `Loss` objects that are means, `add_loss`), and not
in others (`compute_loss`). Within a step it divides nowhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_losses


class _Step(threading.local):
    """Of how many batches the loss that this thread computes is; 0 outside of a step."""

    batches = 0


_step = _Step()


@contextlib.contextmanager
def one_of(batches: int) -> Iterator[None]:
    """Within it Keras computes the loss of one batch of several, whose mean is the loss of all of them."""
    _leave_replicas_to_engines()
    before = _step.batches
    _step.batches = batches
    try:
        yield
    finally:
        _step.batches = before


def combine_by_reduction(model: keras.Model) -> None:
    """Has the sums among the losses that a model was compiled with count the batches of a step.

    Args:
        model: a compiled model, built.
    """
    compiled = model._compile_loss  # Keras keeps its outputs' losses nowhere else
    for place, term in enumerate((compiled and compiled._flat_losses) or ()):
        if getattr(term.loss, "reduction", None) == "sum" and not isinstance(term.loss, _Sum):
            compiled._flat_losses[place] = term._replace(loss=_Sum(term.loss))


def minimized(loss: tf.Tensor) -> tf.Tensor:
    """What of a loss to take gradients of: values for each example, of which they are summed up, become a part's."""
    return loss * tf.cast(max(1, _step.batches), loss.dtype) if loss.shape.rank else loss


class _Sum:
    """A loss that is a sum: of one batch of several it is multiplied by their number."""

    reduction = "sum"

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._loss(*args, **kwargs)
        return value if _step.batches <= 1 else value * keras.ops.cast(_step.batches, value.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)


@cache
def _leave_replicas_to_engines() -> None:
    """From now on Keras doesn't scale a loss by the replicas within a step."""
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        setattr(keras_losses, name, _but_in_a_step(getattr(keras_losses, name)))


def _but_in_a_step(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if _step.batches else scale(value)
