"""The recipe of `benchmarks.elastic`: each worker writes down when it takes a step, by the clock of the machine."""

from typing import Any

import keras
import tensorflow as tf

from benchmarks.programs.waiting import Wait

WIDTH, BATCH = 128, 16


class Stamp(keras.layers.Layer):
    """Passes its input on, and appends the worker's index and the time to a file.

    Args:
        file: the file.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def call(self, inputs: tuple[Any, Any]) -> Any:
        x, worker = inputs
        with tf.control_dependencies([x]):  # those of an execution's steps would all be written when it begins
            line = tf.strings.join([tf.strings.as_string(worker[0]), tf.strings.as_string(tf.timestamp(), 6)], " ")
            written = tf.print(line, output_stream=f"file://{self.file}")
        with tf.control_dependencies([] if written is None else [written]):
            return tf.identity(x)


def model(params: dict[str, Any]) -> keras.Model:
    x, worker, wait = keras.Input((WIDTH,)), keras.Input((), dtype="int32"), keras.Input(())
    # Once the parameters are there: waits of the data alone would all begin when an execution begins.
    hidden = Wait()([Stamp(params["stamps"])([keras.layers.Dense(WIDTH)(x), worker]), wait])
    for _ in range(params["layers"]):
        hidden = keras.layers.Dense(WIDTH, activation="relu")(hidden)
    network = keras.Model([x, worker, wait], hidden)
    network.compile(keras.optimizers.Adam(1e-4), "mse")
    return network


def dataset(params: dict[str, Any], _split: str, shard: Any) -> tf.data.Dataset:
    x = tf.random.stateless_normal((16 * BATCH, WIDTH), (0, shard.worker))
    workers = tf.fill([16 * BATCH], shard.worker)
    waits = tf.fill([16 * BATCH], params["wait"] / BATCH)
    if examples := params.get("examples"):  # of data workers, which prepare each one anew
        numbers = tf.data.Dataset.range(examples)
        return numbers.map(lambda _: ((x[0], tf.constant(shard.worker), waits[0]), x[0]))
    return tf.data.Dataset.from_tensor_slices(((x, workers, waits), tf.reverse(x, [1]))).cache()
