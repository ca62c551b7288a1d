"""A model on several workers trains as in one process, and resumes with another number of stages."""

import json

import keras
import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.launching import launch, project
from tests.support.tasks import Tasks, alone, program
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.module import RecipeModule

pytestmark = pytest.mark.cluster

CLUSTER = "strategy: model_parallel\nroles: {chief: {}, worker: {replicas: 4}}\nrecipe: recipe.yaml\n"
RECIPE_YAML = """
module: branches
stages: 2
micro_batches: 2
train: {max_steps: 24, batch_size: 8, steps_per_epoch: 12, shuffle: 0}
checkpoint: {every_steps: 12}
export: {format: keras}
"""
RECIPE = '''
"""Two inputs, a nested model, tied weights, a mask and two outputs."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def model(params):
    keras.utils.set_random_seed(7)
    words, numbers = keras.Input((6,), name="words", dtype="int32"), keras.Input((4,), name="numbers")
    table = layers.Embedding(20, 8, mask_zero=True, name="table")
    encoder = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(8)], name="encoder")
    hidden = layers.Add()([layers.GRU(8)(table(words)), encoder(numbers)])
    hidden = layers.Dense(8, "tanh")(layers.Add()([encoder(layers.Dense(4)(hidden)), hidden]))
    outputs = {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)}
    network = keras.Model({"words": words, "numbers": numbers}, outputs)
    losses = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    network.compile(keras.optimizers.SGD(0.05, momentum=0.9), losses, metrics={"b": ["accuracy"]})
    return network


def dataset(params, split, shard):
    numbers = np.random.default_rng(0)
    inputs = {"words": numbers.integers(0, 20, (192, 6)), "numbers": numbers.random((192, 4), np.float32)}
    outputs = {"a": numbers.random((192, 1), np.float32), "b": numbers.integers(0, 3, 192)}
    return tf.data.Dataset.from_tensor_slices((inputs, outputs)).shard(shard.count, shard.index)
'''


@pytest.mark.rotates(5, 3)
@pytest.mark.timeout(200)
def test_stages_and_replicas_train_as_one_process_and_resume_with_other_stages(tmp_path, monkeypatch):
    folder = project(tmp_path, CLUSTER, RECIPE, RECIPE_YAML)
    (folder / "branches.py").write_text(RECIPE)
    changed = (
        "--set",
        "stages=4",
        "--set",
        "balance=time",
        "--set",
        "train.batch_size=16",
        "--set",
        "train.max_steps=36",
    )
    for more in ((), changed):
        done = launch(folder, "--run-dir", "run", *more)
        assert done.code == 0, done.stderr
        assert done.processes_left == []
    placed = [line for line in done.lines("events.jsonl") if line["event"] == "placement"]
    assert [sum(size > 0 for size in line["bytes"].values()) for line in placed] == [4, 4]
    monkeypatch.syspath_prepend(folder)
    module = RecipeModule.load(Recipe.model_validate({"module": "branches"}))
    plain = module.model()
    data = module.module.dataset({}, "train", type("All", (), {"count": 1, "index": 0})).batch(16)
    history = plain.fit(data, epochs=3, shuffle=False, verbose=0).history
    trained = keras.saving.load_model(done.run_dir / "export" / "model.keras")
    for ours, theirs in zip(trained.weights, plain.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    last = json.loads((done.run_dir / "metrics.jsonl").read_text().splitlines()[-2])["values"]
    assert last["loss"] == pytest.approx(history["loss"][-1], rel=1e-4)
    assert last["b_accuracy"] == pytest.approx(history["b_accuracy"][-1])


@pytest.mark.rotates(5, by="model")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"])
def test_50_steps_of_4_stages_and_of_2_replicas_are_those_of_one_process(tmp_path, model):
    assert alone(tmp_path, program("stages.py", "plain", model)).code == 0
    tasks = Tasks(tmp_path, chief=1, worker=4)
    try:
        command = program("stages.py", "staged", model, 4, 2)
        ended = tasks.start(command, env={"TFDIST_STRATEGY": "model_parallel"}).finish()
        assert {one.code for one in ended.values()} == {0}, tasks.outputs()
    finally:
        tasks.close()
    plain, staged = np.load(tmp_path / "plain.npz"), np.load(tmp_path / "staged.npz")
    for stages in ("4", "2"):
        worst = differences(staged, plain, stages, "plain")
        assert worst["variables"] < 1e-5, worst
        assert worst["history"] < 1e-5, worst


@pytest.mark.rotates(5, 1)
@pytest.mark.timeout(200)
def test_the_chief_needs_memory_for_a_part_of_the_model_only(tmp_path):
    """When it creates, saves and restores it."""
    for epochs in (1, 2):
        tasks = Tasks(tmp_path / str(epochs), chief=1, worker=4)
        try:
            command = program("large_stages.py", tmp_path / "checkpoints", epochs)
            ended = tasks.start(command, env={"TFDIST_STRATEGY": "model_parallel"}).finish()
            assert {one.code for one in ended.values()} == {0}, tasks.outputs()
        finally:
            tasks.close()
        found = ended["chief:0"].result
        assert ("resuming from" in ended["chief:0"].err) == (epochs == 2)
        assert found["grown"] < 0.5 * found["model"], found
