"""Parameters and gradients on their way between a worker and the ps: one tensor for each ps, not one for each variable.

Every tensor that crosses the network costs a request, whatever its size. So a ps joins the values of all its variables
of one type before they leave, and takes the gradients of all of them in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.step import Tensors


class Wire:
    """The way of a model's parameters.

    Args:
        parameters: variables, each on the device of its ps.
    """

    def __init__(self, parameters: Sequence[keras.Variable]) -> None:
        self._shapes = [tuple(variable.shape) for variable in parameters]
        self._parameters = parameters
        self._groups: dict[tuple[str, str], list[int]] = {}
        for place, variable in enumerate(parameters):
            self._groups.setdefault((variable.value.device, variable.dtype), []).append(place)

    def pull(self) -> Tensors:
        """Each parameter's value, read once."""
        pulled: list[Any] = [None] * len(self._parameters)
        for (device, _), places in self._groups.items():
            with tf.device(device):
                own = [tf.convert_to_tensor(self._parameters[place].value) for place in places]
                joined = _joined(own)
            for place, value in zip(places, self._parted(joined, places), strict=True):
                pulled[place] = value
        return pulled

    def push(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients, where their variables are; sparse ones cross as they are."""
        pushed = list(gradients)
        for (device, _), places in self._groups.items():
            dense = [place for place in places if isinstance(gradients[place], tf.Tensor)]
            if not dense:
                continue
            joined = _joined([gradients[place] for place in dense])
            with tf.device(device):
                for place, gradient in zip(dense, self._parted(joined, dense), strict=True):
                    pushed[place] = gradient
        return pushed

    def _parted(self, joined: tf.Tensor, places: list[int]) -> Tensors:
        shapes = [self._shapes[place] for place in places]
        if len(places) == 1:
            return [tf.reshape(joined, shapes[0])]
        parts = tf.split(joined, [int(np.prod(shape)) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _joined(values: Tensors) -> tf.Tensor:
    if len(values) == 1:
        return tf.identity(values[0])
    return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
