"""Measures how long each layer of a model takes, so that stages of about equal times can be made of them.

A layer's forward and backward pass is measured by itself, where the layer's variables are. No task ever holds the whole
model, and the state of the model stays as it is. Others measure layers for the same purpose: `balance_by_time` of
torchgpipe (Kim et al., torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models, 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.op_errors import summary
from tfdist_cli.train.tf_compat.patching import replaced

PASSES = 5
"""How often a layer is measured. The shortest time counts: others use the processor as well."""


class LayerTimes:
    """The times of a model's layers in one training step, which is taken layer by layer.

    Args:
        layers: the layers to measure.
        devices: the devices of the workers; "" is this process. A layer is measured on the one with the most bytes of
            its weights.
    """

    def __init__(self, layers: Sequence[keras.Layer], devices: Sequence[str]) -> None:
        self._layers, self._devices = layers, devices
        self._device = devices[0]
        self._seconds: dict[int, float] = {}
        self._calls = {device: _seconds(_nothing(device)) for device in devices}
        """The seconds of the call of a function on each device, which are no time of a layer."""
        self._trained_before = False
        """Whether the gradient of a layer's inputs is needed: a layer before it has trainable weights."""
        self._failed: keras.Layer | None = None
        """The layer whose call or gradient failed."""

    def measure(self, model: keras.Model, batch: Any) -> dict[int, float]:
        """Calls the model once, and measures each layer at its calls.

        Args:
            model: the model, with its variables.
            batch: a micro-batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The seconds of the forward and backward passes of each layer that is called, by its `id`.

        Raises:
            TrainingError: the model cannot be called with `x`, or a layer's gradient cannot be computed.
        """
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        with ExitStack() as within:
            within.enter_context(keras.StatelessScope())
            for layer in {id(layer): layer for layer in self._layers}.values():
                within.enter_context(replaced(layer, {"call": self._measured(layer)}))
            try:
                model(x, training=True)
            except Exception as error:
                failed = f"the layer {self._failed.name!r}" if self._failed else f"the model {model.name!r}"
                raise TrainingError(
                    f"the layers cannot be measured: {failed} fails on the inputs of a batch: {summary(error)}",
                    code="layers-not-measured",
                    hint="use balance: bytes, or name the worker of each layer in place",
                ) from error
        return self._seconds

    def _measured(self, layer: keras.Layer) -> Any:
        call = layer.call

        def measured(*args: Any, **kwargs: Any) -> Any:
            self._device = self._device_of(layer)
            inputs = _floats((args, kwargs)) if self._trained_before else []
            passes = _passes(layer, call, args, kwargs, inputs, self._device)
            try:
                seconds = _seconds(passes) - self._calls[self._device]
            except Exception:
                self._failed = self._failed or layer
                raise
            self._seconds[id(layer)] = self._seconds.get(id(layer), 0.0) + max(seconds, 0.0)
            self._trained_before |= bool(layer.trainable_weights)
            with tf.device(self._device):
                return call(*args, **kwargs)

        return measured

    def _device_of(self, layer: keras.Layer) -> str:
        """The worker with the most of a layer's weights; for a layer without weights there, that of the one before."""
        stored = dict.fromkeys(self._devices, 0)
        for weight in layer.weights:
            if weight.value.device in stored:
                stored[weight.value.device] += int(np.prod(weight.shape))
        most = max(stored, key=stored.__getitem__)
        return most if stored[most] else self._device


def _passes(layer: keras.Layer, call: Any, args: Any, kwargs: Any, inputs: Sequence[tf.Tensor], device: str) -> Any:
    """Returns a function of one forward and backward pass. It returns a value of each result, so that none is left out.

    Its weights are copied to the device at each pass: small ones may be on the chief.

    Args:
        layer: the layer.
        call: its `call`.
        args: the arguments of `call`.
        kwargs: further arguments of `call`.
        inputs: those of which the gradient is computed.
        device: where it is computed.
    """

    @tf.function(autograph=False)
    def passes() -> list[tf.Tensor]:
        with tf.device(device), tf.GradientTape() as tape:
            tape.watch(inputs)
            weights = [(weight, tf.identity(weight.value)) for weight in layer.variables]
            trained = [value for weight, value in weights if weight.trainable]
            tape.watch(trained)
            with keras.StatelessScope(weights):
                outputs = call(*args, **kwargs)
        with tf.device(device):
            differentiable = _floats(outputs)
            gradients = tape.gradient(differentiable, [*trained, *inputs]) if differentiable else []
            computed = tf.nest.flatten([gradients, outputs], expand_composites=True)
            return [tf.reshape(each, [-1])[:1] for each in computed if isinstance(each, tf.Tensor)]

    return passes


def _nothing(device: str) -> Any:
    """Returns a function that computes nothing on a device."""

    @tf.function(autograph=False)
    def nothing() -> list[tf.Tensor]:
        with tf.device(device):
            return [tf.zeros([1])]

    return nothing


def _seconds(function: Any) -> float:
    """The shortest time of a call of a function, after a first one that traces it."""
    seconds = []
    for _ in range(PASSES + 1):
        begin = perf_counter()
        function()[-1].numpy()
        seconds.append(perf_counter() - begin)
    return min(seconds[1:])


def _floats(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [each for each in flat if isinstance(each, tf.Tensor) and each.dtype.is_floating]
