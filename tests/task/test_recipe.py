"""Tests of a recipe's task: results that cannot be saved."""

import stat
import sys

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import ResultNotSaved
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.recipe import run_recipe
from tfdist_cli.train.cluster import join

pytestmark = pytest.mark.slow

MODULE = """
import os
import shutil
import keras
import numpy as np
import tensorflow as tf

def model(params):
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    return network

def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices((np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)))

def callbacks(params):
    def remove(epoch, logs):
        for folder in params["removed"]:
            os.rename(folder, folder + ".gone")  # at once, while a checkpoint may be written
            shutil.rmtree(folder + ".gone", ignore_errors=True)

    return [keras.callbacks.LambdaCallback(on_epoch_end=remove)]
"""


def test_the_model_is_exported_if_the_last_checkpoint_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "one_layer.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(join, "_joined", None)
    checkpoints, run_dir = tmp_path / "disk" / "checkpoints", tmp_path / "run"
    run_dir.mkdir()
    spec = {
        "module": "one_layer",
        "module_dir": tmp_path,
        "params": {"removed": [str(tmp_path / "disk"), str(run_dir)]},
        "checkpoint": {"every_steps": 2, "dir": checkpoints},
        "evaluate": None,
        "train": {"batch_size": 2},
        "export": {"format": "keras"},
    }
    context = join.join(Environment(run_dir=run_dir))
    with raises(ResultNotSaved, "checkpoint-not-written") as caught:
        run_recipe(context, Recipe.model_validate(spec))
    assert "No such file" in caught.value.message
    assert (run_dir / "export" / "model.keras").is_file()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700, "only the owner can read it"
    assert not checkpoints.parent.exists(), "a removed folder is not created again"
