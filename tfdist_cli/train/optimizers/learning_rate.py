"""The learning rate of an update: the optimizer's own, scaled by the batches that make the update, and warmed up.

It follows from the optimizer's rate and the update's number alone. Callbacks and schedules see and set the optimizer's
rate as they do in one process, and a checkpoint holds nothing more: a resumed training is where `iterations` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_cli.spec.sections.updates import LearningRate

_FACTOR: dict[str, Callable[[int], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}


class Rate:
    """What becomes of an optimizer's learning rate.

    With n workers' batches in an update, the rate is the optimizer's times n (Goyal et al., Accurate, Large Minibatch
    SGD: Training ImageNet in 1 Hour, 2017, section 2.1) or times √n, after a warm-up in which it rises by the same
    amount with each update (section 2.2).

    Args:
        rule: how it is scaled and warmed up.
        batches: n, how many workers' batches are averaged into one update.
    """

    def __init__(self, rule: LearningRate, batches: int) -> None:
        self._factor = _FACTOR[rule.scale](batches)
        self._warmup = rule.warmup_steps
        self._start = 0.0 if rule.scale == "none" else 1.0

    def at(self, base: tf.Tensor, number: Any) -> tf.Tensor:
        """The rate of one update.

        The first update of a warm-up is one rise above where it starts, and the last one has the full rate: no update
        is spent on a rate of 0.

        Args:
            base: the optimizer's own rate at this update, shape ().
            number: how many updates came before, an integer of shape ().

        Returns:
            The rate, of `base`'s type and shape.
        """
        if not self._warmup:
            return base if self._factor == 1 else base * tf.cast(self._factor, base.dtype)
        # In float64: float32 counts no further than 2**24 updates.
        share = tf.minimum((tf.cast(number, tf.float64) + 1) / self._warmup, 1.0)
        return base * tf.cast(self._start + (self._factor - self._start) * share, base.dtype)
