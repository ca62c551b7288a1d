"""Scales the optimizer's learning rate by the number of batches per update, and warms it up.

The result depends on the optimizer's learning rate and `iterations` alone. So callbacks and schedules read and set the
optimizer's rate as in one process, and a checkpoint needs no further state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_cli.spec.sections.updates import LearningRate

_FACTOR: dict[str, Callable[[int], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}


class RateScaling:
    """Scaling and warm-up of a learning rate.

    With n batches per update, the learning rate is multiplied by n (Goyal et al., Accurate, Large Minibatch SGD:
    Training ImageNet in 1 Hour, 2017, section 2.1) or by √n. During the warm-up it rises linearly (section 2.2).

    Args:
        rule: the scale and the length of the warm-up.
        batches: n, the number of batches whose gradients are averaged into one update.
    """

    def __init__(self, rule: LearningRate, batches: int) -> None:
        self._factor = _FACTOR[rule.scale](batches)
        self._warmup = rule.warmup_steps
        self._start = 0.0 if rule.scale == "none" else 1.0

    def at(self, base: tf.Tensor, iterations: Any) -> tf.Tensor:
        """Returns the learning rate of one update.

        The warm-up starts one increment above its initial rate, so that no update has a rate of 0. Its last update has
        the full rate.

        Args:
            base: the optimizer's own learning rate at this update, shape ().
            iterations: the number of updates before this one, an integer of shape ().

        Returns:
            The learning rate, of the type and shape of `base`.
        """
        if not self._warmup:
            return base if self._factor == 1 else base * tf.cast(self._factor, base.dtype)
        # In float64: float32 cannot count beyond 2**24 updates.
        fraction = tf.minimum((tf.cast(iterations, tf.float64) + 1) / self._warmup, 1.0)
        return base * tf.cast(self._start + (self._factor - self._start) * fraction, base.dtype)
