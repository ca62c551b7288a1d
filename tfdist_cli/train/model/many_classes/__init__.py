"""The loss and the accuracy of models with many classes, with fewer passes over the scores than TensorFlow's kernels.

On a CPU, the loss of a language model takes a quarter of a step's time by TensorFlow's kernel, and the accuracy a
twelfth. Within `fewer_passes`, Keras computes both by the functions of this package, which need a third of that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import tensorflow as tf

from tfdist_cli.train.model.many_classes import argmax, cross_entropy
from tfdist_cli.train.tf_compat.keras_model import replace_class_functions

LEAST_CLASSES = 256
"""With fewer classes, the time of a kernel's call counts more than that of its passes."""


class _Scope(threading.local):
    """Whether this thread computes a step."""

    active = False


_scope = _Scope()


@contextlib.contextmanager
def fewer_passes() -> Iterator[None]:
    """Within the context, Keras's cross-entropy of class numbers and its argmax are computed by this package.

    Not for steps that XLA compiles, which fuses TensorFlow's own operations.
    """
    _patch()
    before, _scope.active = _scope.active, True
    try:
        yield
    finally:
        _scope.active = before


def _applies(scores: Any) -> bool:
    """Whether scores are worth it: (…, classes), on a CPU, of a type in which TensorFlow's kernels compute, too."""
    if not (_scope.active and isinstance(scores, tf.Tensor) and scores.dtype in (tf.float32, tf.float64)):
        return False
    many = bool(scores.shape.rank and scores.shape.rank >= 2 and (scores.shape[-1] or 0) >= LEAST_CLASSES)
    return many and not tf.config.list_logical_devices("GPU")


@cache
def _patch() -> None:
    """Replaces both functions, for the whole process; outside of the context they are the original ones."""
    replace_class_functions(_loss, _argmax)


def _loss(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def loss(labels: Any, logits: Any, name: str | None = None) -> Any:
        if not (_applies(logits) and labels.shape.rank == logits.shape.rank - 1):
            return kernel(labels, logits, name=name)
        return cross_entropy.of_classes(labels, logits)

    return loss


def _argmax(by_keras: Callable[..., Any]) -> Callable[..., Any]:
    def largest(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
        if not (_applies(x) and axis in (-1, x.shape.rank - 1) and not keepdims):
            return by_keras(x, axis=axis, keepdims=keepdims)
        return argmax.of_rows(x, by_keras)

    return largest
