"""The recipe of `benchmarks.waits` and `benchmarks.mixed`: steps wait, as for an accelerator, and use no processor.

Its parameter `wait` is how many milliseconds a batch of `batch` examples takes, on every worker, or a number for each.
Other batches take longer, or shorter, in proportion.
"""

import json
import os
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist_cli.train.tf_compat.control_flow import unordered

WIDTH = 512
"""One dense layer of this width has 1 MB of weights."""


def held(x: tf.Tensor, milliseconds: tf.Tensor) -> tf.Tensor:
    """Returns a tensor after some time; no thread computes then.

    A dataset of one element is read, which TensorFlow's runtime holds back on a timer. Python takes no part in it, so
    that workers that run functions of another process can wait, too.

    Args:
        x: the tensor.
        milliseconds: how long, shape ().
    """
    # A dataset of the input is neither a constant, which would be computed once, nor read before the step.
    one = tf.reduce_mean(tf.stop_gradient(x))
    kind: Any = {"output_types": [one.dtype], "output_shapes": [one.shape]}
    # TensorFlow keeps operations on datasets in the order of the program, also those of several micro-batches.
    data = unordered(tf.raw_ops.TensorDataset(components=[one], output_shapes=[one.shape]))
    data = unordered(tf.raw_ops.RepeatDataset(input_dataset=data, count=tf.constant(-1, tf.int64), **kind))
    wait = tf.cast(tf.round(1000.0 * milliseconds), tf.int64)
    data = unordered(tf.raw_ops.SleepDataset(input_dataset=data, sleep_microseconds=wait, **kind))
    # One element, without asking for the end: that would wait again.
    data = unordered(tf.raw_ops.TakeDataset(input_dataset=data, count=tf.constant(1, tf.int64), **kind))
    return x + 0.0 * unordered(tf.raw_ops.DatasetToSingleElement(dataset=data, **kind))[0]


class Wait(keras.layers.Layer):
    """Passes its first input on after as many milliseconds as its second input adds up to."""

    def call(self, inputs: Any) -> Any:
        return held(inputs[0], tf.reduce_sum(inputs[1]))


def model(_params: dict[str, Any]) -> keras.Model:
    inputs = keras.Input((WIDTH,)), keras.Input(())
    # It waits once the parameters are there: a wait of the data alone would begin during the step before.
    hidden = keras.layers.Dense(WIDTH)(inputs[0])
    network = keras.Model(inputs, Wait()([hidden, inputs[1]]))
    network.compile(keras.optimizers.SGD(0.01), "mse")
    return network


def dataset(params: dict[str, Any], _split: str, shard: Any) -> tf.data.Dataset:
    inputs = tf.random.stateless_normal((16 * params["batch"], WIDTH), (0, shard.index))
    waits = params["wait"]
    wait = waits[_worker()] if isinstance(waits, list) else waits
    milliseconds = tf.constant(wait / params["batch"])
    arrays = tf.data.Dataset.from_tensor_slices((inputs, tf.reverse(inputs, [1])))
    # Not one of the arrays: those have to be the same on all mirrored workers.
    return arrays.map(lambda x, y: ((x, milliseconds), y)).cache()


def _worker() -> int:
    """The number of the worker that reads the data: the chief calls this for workers of parameter servers."""
    device = tf.DeviceSpec.from_string(context.context().device_name or "")
    if device.job == "worker":
        return int(device.task)
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return int(task["index"]) if task["type"] == "worker" else 0
