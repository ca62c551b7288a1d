"""The recipe of `benchmarks.bubble`: stages whose forward and backward passes wait, and use no processor.

Its parameter `stages` is the number of blocks, and `wait` how many milliseconds a block's forward pass of a batch of
`batch` examples takes. The backward pass takes twice as long. A part of a batch takes its part of the time.
"""

from typing import Any

import keras
import tensorflow as tf

from benchmarks.programs.waiting import held

WIDTH = 32


@keras.saving.register_keras_serializable("benchmarks")
class Stage(keras.layers.Layer):
    """A dense layer whose passes take their time.

    Args:
        milliseconds: those of an example's forward pass.
    """

    def __init__(self, milliseconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._milliseconds = milliseconds
        self._dense = keras.layers.Dense(WIDTH, activation="tanh")

    def build(self, shape: Any) -> None:
        self._dense.build(shape)

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def slow(values: tf.Tensor) -> Any:
            each = self._milliseconds * tf.cast(tf.shape(values)[0], tf.float32)
            return held(values, each), lambda gradient: held(gradient, 2 * each)

        return slow(self._dense(x))


def model(params: dict[str, Any]) -> keras.Model:
    each = params["wait"] / params["batch"]
    layers = [Stage(each, name=f"stage_{number}") for number in range(params["stages"])]
    network = keras.Sequential([keras.Input((WIDTH,)), *layers])
    network.compile(keras.optimizers.SGD(0.01), "mse")
    return network


def dataset(params: dict[str, Any], _split: str, shard: Any) -> tf.data.Dataset:
    inputs = tf.random.stateless_normal((16 * params["batch"], WIDTH), (0, shard.index))
    return tf.data.Dataset.from_tensor_slices((inputs, tf.reverse(inputs, [1]))).cache()
