"""Data workers of a real cluster: each example once over all workers, and an end when one of the data workers goes."""

import os
import re
import signal
import subprocess

import pytest

from tests.cluster.test_roles import PROXIES
from tests.support.launching import finish, launch, project, start

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COUNT = 480
IDS = f'''
"""Examples that are numbers, and a metric that says how many of them were seen exactly once."""

import keras
import tensorflow as tf


class Once(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="once")
        self.seen = self.add_weight(shape=({COUNT},), initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        self.seen.assign_add(keras.ops.sum(keras.ops.one_hot(ids, {COUNT}), axis=0))

    def result(self):
        return keras.ops.sum(keras.ops.cast(keras.ops.equal(self.seen, 1), "float32"))


def model(params):
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    network.compile("sgd", "mse", metrics=[Once()])
    return network


def dataset(params, split, shard):
    ids = tf.data.Dataset.range({COUNT}).shard(shard.count, shard.index)
    return ids.map(lambda number: (tf.zeros([4]), number))
'''
RECIPE_YAML = "module: four_classes\ntrain: {epochs: 2, batch_size: 8, share: service}\nevaluate: null\n"
SERVED = (
    "strategy: parameter_server\n"
    "roles: {chief: {}, ps: {}, worker: {replicas: 3}, data_dispatcher: {}, data_worker: {replicas: 2}}\n"
    "recipe: recipe.yaml\n"
)
ALONE = "strategy: single\nroles: {chief: {}, data_dispatcher: {}, data_worker: {}}\nrecipe: recipe.yaml\n"


def test_three_asynchronous_workers_see_each_example_exactly_once_an_epoch(tmp_path, monkeypatch):
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    done = launch(project(tmp_path, SERVED, IDS, RECIPE_YAML))
    assert done.code == 0, done.stderr
    assert done.processes_left == []
    epochs = [line for line in done.lines("metrics.jsonl") if line["epoch_done"]]
    assert [line["values"]["once"] for line in epochs] == [COUNT, COUNT]
    assert [line["step"] for line in epochs] == [60, 120]
    assert len(epochs[-1]["worker_steps"]) > 1


@pytest.mark.rotates(5)
@pytest.mark.parametrize("task", ["data_worker:0", "data_dispatcher:0"])
def test_a_training_whose_data_has_nobody_any_more_ends_and_names_who_it_was(task, tmp_path):
    folder = project(tmp_path, ALONE, IDS, RECIPE_YAML)
    process = start(folder, "--run-dir", "run", "--set", "train.epochs=100000", "--max-restarts", 0)
    events = folder / "run" / "events.jsonl"
    while not re.search(r'"state": ?"training"', events.read_text() if events.exists() else ""):
        _pause(process)
    pid = re.search(rf'"task": ?"{task}",.*"pid": ?(\d+)', events.read_text())
    assert pid
    os.kill(int(pid[1]), signal.SIGKILL)
    done = finish(process, timeout=25)
    assert done.code in (1, 137), done.stderr
    assert re.search(rf"error\[task-lost\]: .*{task} at 127\.0\.0\.1:\d+ ", done.stderr), done.stderr
    assert done.processes_left == []


def _pause(process):
    """Lets a launch go on for a moment; nothing announces what it writes."""
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError(process.communicate()[1])
