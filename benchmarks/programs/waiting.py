"""The recipe of `benchmarks.waits`: each step waits without using the processor, as for an accelerator."""

from typing import Any

import keras
import tensorflow as tf

WIDTH = 512
"""One dense layer of this width has 1 MB of weights."""
BATCH = 8


class Wait(keras.layers.Layer):
    """Passes its input on after some milliseconds, in which no thread computes.

    A dataset of one element is read, which TensorFlow's runtime holds back on a timer. Python takes no part in it, so
    that workers that run functions of another process can wait, too.
    """

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds

    def call(self, x: Any) -> Any:
        # A dataset of the input is neither a constant, which would be computed once, nor read before the step.
        one = tf.reduce_mean(tf.stop_gradient(x))
        dataset = tf.data.Dataset.from_tensors(one).repeat()
        kind = {"output_types": [one.dtype], "output_shapes": [one.shape]}
        held = tf.raw_ops.SleepDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            sleep_microseconds=tf.constant(round(1000 * self.milliseconds), tf.int64),
            **kind,
        )
        # One element, without asking for the end: that would wait again.
        first = tf.raw_ops.TakeDataset(input_dataset=held, count=tf.constant(1, tf.int64), **kind)
        return x + 0.0 * tf.raw_ops.DatasetToSingleElement(dataset=first, **kind)[0]


def model(params: dict[str, Any]) -> keras.Model:
    network = keras.Sequential([keras.Input((WIDTH,)), Wait(params["wait"]), keras.layers.Dense(WIDTH)])
    network.compile(keras.optimizers.SGD(0.01), "mse")
    return network


def dataset(_params: dict[str, Any], _split: str, shard: Any) -> tf.data.Dataset:
    inputs = tf.random.stateless_normal((16 * BATCH, WIDTH), (0, shard.index))
    return tf.data.Dataset.from_tensor_slices((inputs, tf.reverse(inputs, [1]))).cache()
