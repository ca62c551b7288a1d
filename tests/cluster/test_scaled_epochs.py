"""The examples of epochs within which the number of mirrored workers changes: in real trainings, against Keras."""

import keras
import numpy as np
import pytest

from tests.support.launching import launch, project

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

RECIPE = '''
import os
import signal

import keras
import numpy as np
import tensorflow as tf


def model(params):
    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    network.set_weights([np.linspace(-0.5, 0.5, weight.size).reshape(weight.shape) for weight in network.get_weights()])
    network.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=[Counts()])
    return network


class Counts(keras.metrics.Sum):
    """Counts the examples."""

    def __init__(self):
        super().__init__(name="examples")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true))


class Stop(keras.callbacks.Callback):
    """Ends the training after a step as if its node were taken away: the step after it has the request."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def callbacks(params):
    return [Stop(params["stop"])]


def data():
    numbers = np.random.default_rng(5)
    x = numbers.normal(size=(300, 8)).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True))


def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices(data()).shard(shard.count, shard.index)
'''
RECIPE_YAML = """
module: four_classes
params: {stop: 0}
train: {epochs: 2, batch_size: 2, shuffle: 0}
checkpoint: {every_steps: 1000}
export: {format: keras}
"""
CLUSTER = "strategy: multi_worker_mirrored\nroles: {worker: {}}\nrecipe: recipe.yaml\n"


def trained_by_keras(batches):
    """The weights after batches of the data: each is the range of its examples."""
    names = {}
    exec(RECIPE, names)
    model, (x, y) = names["model"]({}), names["data"]()
    for begin, end in batches:
        model.train_on_batch(x[begin:end], y[begin:end])
    return model.get_weights()


def examples(launches):
    """The ranges of examples in the steps of some launches: workers, the batch at which they begin, and steps."""
    return [
        (2 * (begin + workers * number), 2 * (begin + workers * number + workers))
        for workers, begin, steps in launches
        for number in range(steps)
    ]


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("changes", "second"),
    [
        # Each number of workers begins where the one before has ended, so each example comes once in an epoch.
        pytest.param([(1, 0, 12), (3, 12, 8), (2, 36, 9), (3, 54, 10), (2, 84, 33)], (2, 0, 75), id="even"),
        # 13 batches are 4 1/3 steps of three workers: they begin with their sixth step. 34 batches are left for two.
        pytest.param([(1, 0, 13), (3, 15, 8), (2, 38, 9), (4, 56, 10), (3, 96, 7), (2, 116, 17)], (2, 0, 75), id="odd"),
    ],
)  # fmt: skip
def test_several_resizes_within_an_epoch(changes, second, tmp_path):
    folder, step = project(tmp_path, CLUSTER, RECIPE, RECIPE_YAML), 0
    for workers, _, steps in changes[:-1]:
        step += steps
        options = "--set", f"roles.worker.replicas={workers}", "--set", f"params.stop={step}"
        stopped = launch(folder, "--run-dir", "run", "--max-restarts", "0", *options)
        assert f"after step {step}" in stopped.stderr
    done = launch(folder, "--run-dir", "run", "--set", f"roles.worker.replicas={changes[-1][0]}")
    assert done.code == 0, done.stderr
    ends = [line for line in done.lines("metrics.jsonl") if line["epoch_done"] and line["split"] == "train"]
    assert {line["epoch"]: line["values"]["examples"] for line in ends} == {1: 300, 2: 300}
    trained = keras.saving.load_model(done.run_dir / "export" / "model.keras", compile=False)
    for own, keras_own in zip(trained.get_weights(), trained_by_keras(examples([*changes, second])), strict=True):
        np.testing.assert_allclose(own, keras_own, rtol=1e-4, atol=1e-6)
