"""An evaluator that exports the best checkpoint, and ends the training when no better one comes."""

import json

import keras
import pytest

from tests.support.chaos import Fault, Training
from tests.support.launching import launch
from tests.support.tasks import ROLE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

CLUSTER = """
strategy: parameter_server
roles: {chief: {}, ps: {}, worker: {}, evaluator: {}}
recipe: recipe.yaml
"""
MODULE = '''
"""One weight that grows from 0 to 1, and is best for the validation data at 0.5, after 86 steps."""

import keras
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep


def model(params):
    network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    network.compile(keras.optimizers.SGD(0.004), "mse")
    return network


def dataset(params, split, shard):
    target = 1.0 if split == "train" else 0.5
    examples = tf.data.Dataset.from_tensor_slices((tf.ones([64, 1]), tf.fill([64, 1], target)))
    return examples.shard(shard.count, shard.index).apply(sleep(4000 if split == "train" else 0))
'''
RECIPE = """
module: growing
train: {epochs: 100000, batch_size: 4, steps_per_execution: 1}
checkpoint: {every_steps: 20}
evaluate: {every_epochs: null, monitor: val_loss, patience: 6}
export: {format: keras, best: true}
"""


def weight(path):
    return float(keras.saving.load_model(path).get_weights()[0][0, 0])


@pytest.mark.rotates(5, 4)
def test_the_best_checkpoint_is_exported_and_the_training_ends_after_a_restart_of_the_evaluator(tmp_path):
    (tmp_path / "growing.py").write_text(MODULE)
    (tmp_path / "growing.yaml").write_text(RECIPE)
    training = Training(tmp_path, CLUSTER, "--recipe", tmp_path / "growing.yaml")
    best = training.run / "export" / "best" / "model.keras"
    try:
        training.until(lambda: any(line["step"] == 100 for line in training.lines("evaluation.jsonl")))
        assert training.inject(Fault("evaluator:0", 100))
        done = training.finish()
    finally:
        training.stop()
    assert done.code == 0, done.stderr
    assert [loss["task"] for loss in done.report["losses"]] == ["evaluator:0"]
    scores = json.loads((training.run / "checkpoints" / "evaluator.json").read_text())
    assert (scores["best"], scores["stops"]) == (80, True)
    assert weight(best) == pytest.approx(1 - 0.992**80, abs=1e-5)
    assert done.report["step"] >= 220  # six checkpoints after the best one, and the next one
    assert weight(training.run / "export" / "model.keras") == pytest.approx(1 - 0.992 ** done.report["step"], abs=1e-4)
    assert set(done.report["exports"]) == {str(best), str(training.run / "export" / "model.keras")}
    again = launch(tmp_path, "--run-dir", "run", "--recipe", "growing.yaml")
    assert (again.code, again.report["step"]) == (0, done.report["step"]), again.stderr


@pytest.mark.rotates(5, 0)
def test_tasks_without_a_launcher_use_the_scores_of_the_evaluator_too(cluster, tmp_path):
    (tmp_path / "growing.py").write_text(MODULE.replace("4000", "1000"))
    (tmp_path / "growing.yaml").write_text(RECIPE)
    tasks, run = cluster(chief=1, ps=1, worker=1, evaluator=1), tmp_path / "run"
    for task in tasks.tasks:
        recipe = () if task.startswith(("ps", "worker")) else ("--recipe", str(tmp_path / "growing.yaml"))
        tasks.start((*ROLE, "--planned", *recipe), task, env={"TFDIST_RUN_DIR": str(run)})
    ended = tasks.finish(150)
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    scores = json.loads((run / "checkpoints" / "evaluator.json").read_text())
    assert (scores["best"], scores["stops"]) == (80, True)
    assert weight(run / "export" / "best" / "model.keras") == pytest.approx(1 - 0.992**80, abs=1e-5)
    scored = [json.loads(line)["step"] for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert scored == scores["scored"]
