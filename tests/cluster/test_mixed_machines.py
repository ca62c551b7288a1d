"""Workers of different speeds: none of them is held up by a slower one."""

import pytest

from tests.support.launching import MIRRORED, PARAMETER_SERVER, launch, project

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.rotates(5, 4)]

BATCH, MILLISECONDS = 16, (2.0, 4.0)
"""The time that the workers need for an example."""
RECIPE = '''
"""A model whose step takes as long as its examples say: an accelerator's stand-in, which needs no processor."""

import json
import os

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep
from tensorflow.python.eager import context


class Held(keras.layers.Layer):
    """Returns its first input after as many milliseconds as the first feature of its second one adds up to."""

    def call(self, inputs):
        hidden, x = inputs
        with tf.control_dependencies([hidden]):  # the step has begun: its parameters are there
            milliseconds = tf.identity(tf.reduce_sum(x[:, 0]))
        # A dataset of one element waits twice: for the element, and for the end.
        held = tf.data.Dataset.range(1).apply(sleep(tf.cast(500 * milliseconds, tf.int64)))
        with tf.control_dependencies([held.reduce(tf.constant(0, tf.int64), lambda before, _: before)]):
            return tf.identity(hidden)


def model(params):
    x = keras.Input((8,))
    hidden = Held()([keras.layers.Dense(16, "relu")(x), x])
    network = keras.Model(x, keras.layers.Dense(4)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
    return network


def dataset(params, split, shard):
    device = tf.DeviceSpec.from_string(context.context().device_name or "")  # of a worker of parameter servers
    own = json.loads(os.environ["TF_CONFIG"])["task"]
    x = np.random.default_rng(0).random((4096, 8), np.float32)
    y = x[:, :4].argmax(axis=1)
    worker = device.task if device.job == "worker" else own["index"] if own["type"] == "worker" else 0
    x[:, 0] = 0
    wait = np.eye(8, dtype=np.float32)[0] * params["milliseconds"][worker]  # not in the arrays, which are compared
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index).map(lambda x, y: (x + wait, y))
'''
RECIPE_YAML = f"""
module: four_classes
params: {{milliseconds: {list(MILLISECONDS)}}}
train: {{epochs: 2, batch_size: {BATCH}, steps_per_epoch: %d, steps_per_execution: 5}}
updates: %s
evaluate: null
"""


def trained(folder, steps, updates, cluster=PARAMETER_SERVER % ""):
    """A launch, and the steps of each worker in its second epoch, in which nothing is traced.

    No rate is looked at: it depends on what else the machine does, and the shares of the workers hardly do.
    """
    done = launch(project(folder, cluster, RECIPE, RECIPE_YAML % (steps, updates)))
    assert done.code == 0, done.stderr
    before, after = [line for line in done.lines("metrics.jsonl") if line["epoch_done"]]
    taken = {worker: count - before["worker_steps"][worker] for worker, count in after["worker_steps"].items()}
    return done, taken


def test_an_asynchronous_worker_of_half_the_speed_takes_half_the_steps(tmp_path):
    steps = 240
    done, taken = trained(tmp_path, steps, "{mode: async}")
    assert sum(taken.values()) == steps
    assert 1.4 < taken["worker:0"] / taken["worker:1"] < 2.6
    workers = done.report["workers"]
    assert [each["examples"] for each in workers.values()] == [BATCH * each["steps"] for each in workers.values()]
    assert sum(each["steps"] for each in workers.values()) == 2 * steps
    assert sum(each["share"] for each in workers.values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("cluster", [PARAMETER_SERVER % "", MIRRORED], ids=["ps", "mirrored"])
def test_a_synchronous_worker_of_half_the_speed_takes_half_the_examples(cluster, tmp_path):
    steps = 80
    done, taken = trained(tmp_path, steps, "{mode: sync, batch: proportional}", cluster)
    assert taken == {"worker:0": steps, "worker:1": steps}
    workers = done.report["workers"]
    assert sum(each["examples"] for each in workers.values()) == 2 * steps * 2 * BATCH
    assert 0.55 < workers["worker:0"]["share"] < 0.7
