"""Which ps a variable lives on: the one that has the fewest bytes so far.

TensorFlow deals variables out in turn, so that of layers that have a kernel and a bias each, one of two ps gets all the
kernels and the other all the biases. By bytes, no ps has more than the mean and the largest variable together (Graham,
Bounds on Multiprocessing Timing Anomalies, 1969). An optimizer's slots follow their variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


class Placement:
    """Deals out the variables of one strategy, from its first on.

    Args:
        strategy: a new `tf.distribute.ParameterServerStrategy`.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._extended = strategy.extended
        self.bytes = [0] * self._extended._num_ps
        """Bytes on each ps, without slots."""
        self._create: Callable[..., Any] = self._extended._create_variable_round_robin
        self._extended._create_variable_round_robin = self._create_on_lightest

    def _create_on_lightest(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        lightest = int(np.argmin(self.bytes))
        self._extended._variable_count = lightest  # TensorFlow's next variable goes to this number's ps
        variable = self._create(creator, **kwargs)
        self.bytes[lightest] += variable.dtype.size * int(np.prod(variable.shape))
        return variable
